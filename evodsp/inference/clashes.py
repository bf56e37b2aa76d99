"""Clashes between the chains of a complex: heavy atoms where there is no room for both.

Neither DockQ nor lDDT sees them: two chains that lie in each other may score as an acceptable interface. A pair of heavy atoms
of different chains clashes below `CLASH_DISTANCE`. That is less than any bond between chains but a disulphide bridge, whose two
SG do not count, and less than a hydrogen bond (2.5 Å).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Float64, Shaped

from evodsp.geometry.residues import ATOM_ORDER

CLASH_DISTANCE = 2.0
"""Å."""
_MOST_AT_ONCE = 1 << 22
_SG = ATOM_ORDER["SG"]

Atoms = tuple[Float[np.ndarray, "R 37 3"], Shaped[np.ndarray, "R 37"]]
"""Positions of a chain's atoms in Å, and their mask."""


def clashes_of(chains: Sequence[Atoms]) -> dict[tuple[int, int], int]:
    """The number of pairs of atoms that clash, of each two chains of which some do."""
    atoms = [_flat(*chain) for chain in chains]
    found = {(a, b): _between(atoms[a], atoms[b]) for a, b in combinations(range(len(atoms)), 2)}
    return {pair: count for pair, count in found.items() if count}


def clash_line(found: Mapping[tuple[int, int], int], names: Sequence[str]) -> str:
    """A line about the clashes of chains of these names; '' without any."""
    if not found:
        return ""
    (one, other), most = max(found.items(), key=lambda pair: pair[1])
    where = f"chains {names[one]} and {names[other]}"
    where = where if len(found) == 1 else f"{len(found):,} pairs of chains, {most:,} of them in {where}"
    count = sum(found.values())
    what = "1 pair of atoms clashes" if count == 1 else f"{count:,} pairs of atoms clash"
    return f"{what} (closer than {CLASH_DISTANCE:g} Å) in {where}: real chains do not come so near, whatever other scores are"


def _flat(
    positions: Float[np.ndarray, "R 37 3"], mask: Shaped[np.ndarray, "R 37"]
) -> tuple[Float64[np.ndarray, "n 3"], Bool[np.ndarray, " n"]]:
    """The atoms that are there, and whether each is SG."""
    there = mask > 0.5
    return positions[there].astype(np.float64), np.nonzero(there)[1] == _SG


def _between(
    first: tuple[Float64[np.ndarray, "n 3"], Bool[np.ndarray, " n"]],
    second: tuple[Float64[np.ndarray, "m 3"], Bool[np.ndarray, " m"]],
) -> int:
    if not len(first[0]) or not len(second[0]):
        return 0
    (one, sulphur), (other, other_sulphur) = _within(first, second[0]), _within(second, first[0])
    return sum(int((close & ~(bridge[:, None] & other_sulphur)).sum()) for close, bridge in _close(one, sulphur, other))


def _within(
    atoms: tuple[Float64[np.ndarray, "n 3"], Bool[np.ndarray, " n"]], others: Float64[np.ndarray, "m 3"]
) -> tuple[Float64[np.ndarray, "k 3"], Bool[np.ndarray, " k"]]:
    """The atoms in the box around the others."""
    low, high = others.min(0) - CLASH_DISTANCE, others.max(0) + CLASH_DISTANCE
    inside = ((atoms[0] >= low) & (atoms[0] <= high)).all(1)
    return atoms[0][inside], atoms[1][inside]


def _close(
    one: Float64[np.ndarray, "n 3"], sulphur: Bool[np.ndarray, " n"], other: Float64[np.ndarray, "m 3"]
) -> Iterator[tuple[Bool[np.ndarray, "rows m"], Bool[np.ndarray, " rows"]]]:
    """Which atoms are close, some rows at a time, and whether each row is SG."""
    rows = max(1, _MOST_AT_ONCE // max(1, len(other)))
    for start in range(0, len(one), rows):
        some = one[start : start + rows]
        squares = sum((some[:, None, axis] - other[:, axis]) ** 2 for axis in range(3))
        yield np.asarray(squares < CLASH_DISTANCE**2), sulphur[start : start + rows]
