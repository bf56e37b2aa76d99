"""Scores of the interfaces of a predicted complex, from its aligned errors, CB atoms and pLDDT: ipSAE, pDockQ, pDockQ2
and LIS.

They are computed on the host, from what a prediction's files hold. Scores that need the distributions that the heads
predict, such as ipTM, are in `evodsp.model.heads`. Contacts and constants are those of the authors' programs and of
ColabFold:

- ipSAE: Dunbrack 2025, doi 10.1101/2025.02.10.637595, and version 4 of its program, whose smallest d0 is 1 Å.
- pDockQ: Bryant, Pozzati, Elofsson 2022, Nature Communications 13, 1265.
- pDockQ2: Zhu, Shenoy, Kundrotas, Elofsson 2023, Bioinformatics 39, btad424. Contacts and pLDDT are taken as for pDockQ, and
  constants are the paper's, as by ipSAE's program and ColabFold. (With all digits of its authors' program: up to 0.0012 more.)
- LIS: Kim et al. 2024, doi 10.1101/2024.02.19.580970.

The entries of both in a prediction's files are written and read here, too. Of a pair of chains, `A-B` is the key, as in
ColabFold's files.

A clash is a pair of heavy atoms of different chains where there is no room for both. Neither DockQ nor lDDT sees them: two
chains that lie in each other may score as an acceptable interface. A pair of heavy atoms of different chains clashes below
`CLASH_DISTANCE`. That is less than any bond between chains but a disulphide bridge, whose two SG do not count, and less than
a hydrogen bond (2.5 Å).

Shapes: R residues and C chains of the complex, A and P residues of a chain and of its partner. Chains are in the order in
which they were given. Distances and errors are in Å.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Integer, Shaped

from evodsp.geometry.residues import ATOM_ORDER
from evodsp.inference.result_checks import FIX, is_number, wrong
from evodsp.model.heads import CONTACT_DISTANCE
from evodsp.reading.text_files import read_json

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
    (one, sulphur), (other, other_sulphur) = _in_reach(first, second[0]), _in_reach(second, first[0])
    return sum(int((close & ~(bridge[:, None] & other_sulphur)).sum()) for close, bridge in _close(one, sulphur, other))


def _in_reach(
    atoms: tuple[Float64[np.ndarray, "n 3"], Bool[np.ndarray, " n"]], others: Float64[np.ndarray, "m 3"]
) -> tuple[Float64[np.ndarray, "k 3"], Bool[np.ndarray, " k"]]:
    """The atoms in the box around the others."""
    low, high = others.min(0) - CLASH_DISTANCE, others.max(0) + CLASH_DISTANCE
    inside = ((atoms[0] >= low) & (atoms[0] <= high)).all(1)
    return atoms[0][inside], atoms[1][inside]


def _close(
    one: Float64[np.ndarray, "n 3"], sulphur: Bool[np.ndarray, " n"], other: Float64[np.ndarray, "m 3"]
) -> Iterator[tuple[Bool[np.ndarray, "rows m"], Bool[np.ndarray, " rows"]]]:
    """Pairs of close atoms, some rows at a time, and the rows that are SG."""
    rows = max(1, _MOST_AT_ONCE // max(1, len(other)))
    for start in range(0, len(one), rows):
        some = one[start : start + rows]
        squares = sum((some[:, None, axis] - other[:, axis]) ** 2 for axis in range(3))
        yield np.asarray(squares < CLASH_DISTANCE**2), sulphur[start : start + rows]


PAE_CUTOFF = 15.0
"""Aligned errors below this count in ipSAE: its author's value for AlphaFold2's models, and ColabFold's. For AlphaFold3's
models it is 10."""
_DECIMALS = 4
_LIS_CUTOFF = 12.0
_PDOCKQ2_D0 = 10.0
_SMALLEST_D0 = 1.0
_FEWEST_RESIDUES = 26
"""Below this d0 would be less than `_SMALLEST_D0`, and below 15 it is not defined."""


@dataclass(frozen=True)
class Interface:
    """The scores of one chain's interface with another. Higher is better; a score is 0 where no pair of residues counts.

    Each pair of chains has two: errors are seen from the frames of `chain`. The higher one is usually quoted.
    """

    chain: int
    partner: int
    contacts: int
    """Number of pairs of residues whose CB atoms (CA of glycine) are at most `CONTACT_DISTANCE` apart."""
    ipsae: float
    """0 to 1: the TM-score that a residue of `chain` expects of those residues of `partner` that it places well (errors below
    the cutoff), for the best residue. d0 is of the number of residues that it places well."""
    ipsae_d0chn: float
    """The same with d0 of the number of residues of both chains."""
    ipsae_d0dom: float
    """The same with d0 of the number of residues that place well, or are placed well, in this direction."""
    pdockq: float
    """0 to 0.742: from the number of contacts and the mean pLDDT of the residues in contact. The same in both directions."""
    pdockq2: float
    """0 to 1.315: from the mean pLDDT of the residues in contact and the errors of the contacts."""
    lis: float
    """0 to 1: how far errors below 12 Å are below it, on average (local interaction score)."""


def interfaces_of(
    pae: Float[np.ndarray, "R R"],
    chains: Integer[np.ndarray, " R"],
    beta: Float[np.ndarray, "R 3"],
    beta_mask: Shaped[np.ndarray, " R"],
    plddt: Float[np.ndarray, " R"],
    pae_cutoff: float = PAE_CUTOFF,
) -> tuple[Interface, ...]:
    """The interfaces of every ordered pair of chains, by the chains' numbers. None for one chain.

    `pae`: expected errors of the second axis' residues, seen from the frames of the first's. `chains`: the number of each
    residue's chain, from 1; 0 for residues that do not count. `beta`, `beta_mask`: positions of CB, or CA of glycine, and 1
    where they are known (`evodsp.geometry.frames.pseudo_beta`). `plddt`: 0 to 100.
    """
    members = {int(number): np.flatnonzero(chains == number) for number in np.unique(chains[chains > 0])}
    found = []
    for (chain, own), (partner, others) in permutations(members.items(), 2):
        errors = pae[np.ix_(own, others)].astype(np.float64)
        touching = _within(beta[own], beta[others]) & np.outer(beta_mask[own] > 0, beta_mask[others] > 0)
        confidence = _mean(np.concatenate([plddt[own[touching.any(1)]], plddt[others[touching.any(0)]]]))
        close = errors < pae_cutoff
        placed = int(close.any(1).sum() + close.any(0).sum())
        found.append(
            Interface(
                chain=chain,
                partner=partner,
                contacts=int(touching.sum()),
                ipsae=_ipsae(errors, close, close.sum(1)),
                ipsae_d0chn=_ipsae(errors, close, np.full(len(own), len(own) + len(others))),
                ipsae_d0dom=_ipsae(errors, close, np.full(len(own), placed)),
                pdockq=_pdockq(confidence, touching),
                pdockq2=_pdockq2(confidence, errors[touching]),
                lis=_mean(1 - errors[errors < _LIS_CUTOFF] / _LIS_CUTOFF),
            )
        )
    return tuple(found)


def _within(first: Float[np.ndarray, "A 3"], second: Float[np.ndarray, "P 3"]) -> Bool[np.ndarray, "A P"]:
    """Whether two positions are in contact."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    squares = sum((first[:, None, axis] - second[:, axis]) ** 2 for axis in range(3))
    return np.asarray(squares <= CONTACT_DISTANCE**2)


def _ipsae(
    errors: Float64[np.ndarray, "A P"], close: Bool[np.ndarray, "A P"], residues: Integer[np.ndarray, " A"]
) -> float:
    """The best residue's mean over its `close` residues of the TM-score's terms. A residue without any has 0.

    `residues`: the number of residues that d0 is of, for each row.
    """
    d0 = np.maximum(_SMALLEST_D0, 1.24 * (np.maximum(residues, _FEWEST_RESIDUES) - 15.0) ** (1 / 3) - 1.8)  # [A], Å
    terms = 1 / (1 + (errors / d0[:, None]) ** 2)
    return float(((terms * close).sum(1) / np.maximum(close.sum(1), 1)).max())


def _mean(values: Float[np.ndarray, " n"]) -> float:
    """0 without values."""
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0


def _pdockq(confidence: float, touching: Bool[np.ndarray, "A P"]) -> float:
    """`confidence`: mean pLDDT of the residues in contact."""
    contacts = touching.sum()
    return _sigmoid(confidence * np.log10(contacts), 0.724, 152.611, 0.052, 0.018) if contacts else 0.0


def _pdockq2(confidence: float, errors: Float64[np.ndarray, " n"]) -> float:
    """`confidence`: mean pLDDT of the residues in contact; `errors`: of the n contacts."""
    if not len(errors):
        return 0.0
    return _sigmoid(confidence * _mean(1 / (1 + (errors / _PDOCKQ2_D0) ** 2)), 1.31, 84.733, 0.075, 0.005)


def _sigmoid(x: float, height: float, middle: float, slope: float, base: float) -> float:
    """The form of the curves that both pDockQ were fitted with."""
    return float(height / (1 + np.exp(-slope * (x - middle))) + base)


@dataclass(frozen=True)
class ComplexScores:
    """TM-scores that a model predicts for the parts of a complex, 0 to 1. They are described in `evodsp.model.heads`."""

    iptm: float
    actifptm: float
    chain_ptm: Float32[np.ndarray, " C"]
    pair_iptm: Float32[np.ndarray, "C C"]
    pair_actifptm: Float32[np.ndarray, "C C"]


@dataclass(frozen=True)
class PairScores:
    """The scores of two chains, of both directions the higher one."""

    chains: str
    """Their names, such as A-B."""
    iptm: float
    ipsae: float
    pdockq: float
    pdockq2: float
    contacts: int


def score_entries(scores: ComplexScores, interfaces: Sequence[Interface], names: Sequence[str]) -> dict[str, Any]:
    """The entries of the scores' file: ColabFold's keys, and `contacts`. `names`: of the chains, which `interfaces` number from
    1.

    Values of a pair that depend on the direction have both keys, A-B with the errors seen from the frames of A, and B-A.
    """
    places = list(combinations(range(len(names)), 2))

    def of_pairs(values: Float32[np.ndarray, "C C"]) -> dict[str, float]:
        return {f"{names[a]}-{names[b]}": _rounded(float(values[a, b])) for a, b in places}

    directed = {f"{names[one.chain - 1]}-{names[one.partner - 1]}": one for one in interfaces}
    both = {key: one for key, one in directed.items() if one.chain < one.partner}
    return {
        "iptm": _rounded(scores.iptm, 3),
        "actifptm": _rounded(scores.actifptm),
        "per_chain_ptm": {name: _rounded(value) for name, value in zip(names, scores.chain_ptm.tolist(), strict=True)},
        "pairwise_iptm": of_pairs(scores.pair_iptm),
        "pairwise_actifptm": of_pairs(scores.pair_actifptm),
        "ipsae": {key: _rounded(one.ipsae) for key, one in directed.items()},
        "pdockq": {key: _rounded(one.pdockq) for key, one in both.items()},
        "pdockq2": {key: _rounded(one.pdockq2) for key, one in directed.items()},
        "contacts": {key: one.contacts for key, one in both.items()},
    }


def _rounded(value: float, decimals: int = _DECIMALS) -> float:
    return round(value, decimals)


def read_pair_scores(scores: Path, names: Sequence[str]) -> list[PairScores]:
    """The scores of each pair of the chains `names`, in the file of a complex's scores.

    Raises FileFormatError unless predict has written it.
    """
    content = read_json(scores, FIX)
    return list(_pairs(scores, content if isinstance(content, dict) else {}, names))


def _pairs(path: Path, content: Mapping[str, Any], names: Sequence[str]) -> Iterator[PairScores]:
    for first, second in combinations(names, 2):
        key, back = f"{first}-{second}", f"{second}-{first}"
        yield PairScores(
            key,
            _highest(path, content, "pairwise_iptm", [key], 1.0),
            _highest(path, content, "ipsae", [key, back], 1.0),
            _highest(path, content, "pdockq", [key], 1.0),
            _highest(path, content, "pdockq2", [key, back], 1.4),
            int(_highest(path, content, "contacts", [key], 1e12)),
        )


def _highest(path: Path, content: Mapping[str, Any], score: str, keys: Sequence[str], most: float) -> float:
    """The highest of the values of `keys`; each must be at most `most`, a bound of what is believed."""
    entries = content.get(score)
    found: list[Any] = [entries.get(key) if isinstance(entries, dict) else None for key in keys]
    if bad := [one for one in found if not is_number(one, 0.0, most)]:
        raise wrong(path, f"{score} of {keys[0]}", bad[0], f"a number from 0 to {most:g}")
    return float(max(found))
