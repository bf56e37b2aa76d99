"""The bar for a model of complexes: what copying the nearest training complex scores.

The nearest training complex has as many chains, in as many copies each, as the target. Each of its chains is aligned with one
of the target's, so that the sum of the alignment scores is highest; among all training complexes the highest sum counts, of
equals the best resolution (`nearest`). The copy has the target's sequences and the places of the training complex' atoms.

Shapes: C chains of a complex, P permutations of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float64, Int64

from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity.nearest import best_that_is_read, candidates_of
from evodsp.data.similarity.pairs import paired, plain, same_residues, score
from evodsp.data.sources.structures import StructureFolder
from evodsp.geometry.residues import CA

_MOST_PERMUTED = 6
"""Chains, up to which all ways to assign them are tried; of more the best pair goes first."""


@dataclass(frozen=True)
class ComplexCopy:
    """A copy of the nearest training complex. `identity`, `coverage`: as of `evodsp.data.similarity.nearest.Copy`."""

    nearest: str
    identity: float
    coverage: float
    assembly: Assembly
    """The target's chains with atoms of the training complex, and the names that its chains have."""


class TrainingComplexes:
    """Training complexes of a folder of structures, from which copies are made.

    `sequences`: of the chains of each, by name. `assembly`: the biological assembly, None: the asymmetric unit.
    """

    def __init__(self, sequences: Mapping[str, Sequence[str]], folder: StructureFolder, assembly: str | None) -> None:
        self.sequences = {name: tuple(map(plain, letters)) for name, letters in sequences.items()}
        self._folder, self._assembly = folder, assembly
        self._letters = list(dict.fromkeys(letters for chains in self.sequences.values() for letters in chains))
        self._points: dict[tuple[str, str], int] = {}

    def copy_for(self, name: str, target: Assembly) -> ComplexCopy | str:
        """A copy in place of a target, or the reason why there is none. A complex is never copied from itself."""
        own = [plain(chain.sequence) for chain in target.chains]
        points = self._scores_with(list(dict.fromkeys(own)))
        ranked, order = [], {}
        for number, (other, others) in enumerate(self.sequences.items()):
            if other == name or _kinds(others) != _kinds(own):
                continue
            table = np.array([[points[mine].get(letters, -np.inf) for letters in others] for mine in own], np.float64)
            assigned = _best_assignment(table)
            if np.isfinite(total := table[np.arange(len(own)), assigned].sum()):
                ranked.append((int(total), number, other))
                order[other] = assigned
        if not ranked:
            return "there is no training complex with as many chains of as many kinds that it could be aligned with"
        assemblies: dict[str, Assembly] = {}

        def read(other: str) -> tuple[Chain, ...]:
            assemblies[other] = self._folder.assembly(other, self._assembly)
            return assemblies[other].chains

        found = best_that_is_read(ranked, read)
        if isinstance(found, str):
            return f"its nearest training complexes cannot be read: {found}"
        nearest, chains = found
        names = assemblies[nearest].names
        return _copied(target, nearest, [(names[n], chains[n]) for n in order[nearest].tolist()])

    def _scores_with(self, own: list[str]) -> dict[str, dict[str, int]]:
        """The alignment scores of some sequences with those of the training chains that are likeliest near."""
        found: dict[str, dict[str, int]] = {}
        for mine, rows in zip(own, candidates_of(self._letters, own), strict=True):
            found[mine] = {self._letters[row]: self._score(mine, self._letters[row]) for row in rows}
        return found

    def _score(self, first: str, second: str) -> int:
        if (first, second) not in self._points:
            self._points[first, second] = score(first, second)
        return self._points[first, second]


def _kinds(sequences: Sequence[str]) -> list[int]:
    """How many chains each sequence has, ascending: 1, 2 of a homodimer with another chain."""
    return sorted(Counter(sequences).values())


def _best_assignment(points: Float64[np.ndarray, "C C"]) -> Int64[np.ndarray, " C"]:
    """For each row a column of its own, so that the sum is highest."""
    chains = len(points)
    if chains <= _MOST_PERMUTED:
        orders = _permutations(chains)
        return orders[points[np.arange(chains), orders].sum(1).argmax()]
    left, assigned = points.copy(), np.zeros(chains, np.int64)
    for _ in range(chains):
        row, column = np.unravel_index(np.where(np.isnan(left), -np.inf, left).argmax(), left.shape)
        assigned[row] = column
        left[row], left[:, column] = np.nan, np.nan
    return assigned


@cache
def _permutations(chains: int) -> Int64[np.ndarray, "P C"]:
    return np.array(list(itertools.permutations(range(chains))), np.int64)


def _copied(target: Assembly, nearest: str, sources: Sequence[tuple[str, Chain]]) -> ComplexCopy:
    """The copy. `sources`: for each chain of the target the chain that is copied, with its name."""
    chains, same, pairs_of_all = [], 0, 0
    for mine, (name, source) in zip(target.chains, sources, strict=True):
        letters = plain(mine.sequence), plain(source.sequence)
        pairs = paired(*letters)
        pairs = pairs[source.mask[pairs[:, 1], CA] > 0.5]
        same += same_residues(*letters, pairs)
        pairs_of_all += len(pairs)
        positions, mask = np.zeros_like(mine.positions), np.zeros_like(mine.mask)
        positions[pairs[:, 0]], mask[pairs[:, 0]] = source.positions[pairs[:, 1]], source.mask[pairs[:, 1]]
        chains.append(dataclasses.replace(mine, pdb_id=nearest, chain_id=name, positions=positions, mask=mask))
    copy = Assembly(nearest, tuple(name for name, _ in sources), tuple(chains))
    return ComplexCopy(nearest, same / max(1, pairs_of_all), pairs_of_all / len(target), copy)
