"""The overlap of a run's training, validation and test chains: shared chains, equal sequences, and the likeness of the
others.

The identity of two sequences is the number of identical residues in their alignment by BLOSUM62 (a gap costs 11, each further
residue of it 1, gaps at the ends nothing), as a share of the shorter sequence, as in CD-HIT. X is identical to nothing.

Millions of pairs cannot be aligned. So each chain of the smaller set is aligned only with the few sequences of the other set
that share most words of four residues with it, as a share of the words of the one that has fewer. Sequences without a common
word are not aligned: nobody would call them a leak.

Two complexes are as alike as their most alike chains. That is often no leak: complexes of a family share a chain, such as an
antigen. A complex is known from training if one training complex has a near chain for every chain of it: more than `NEAR` of
the residues are identical. Numbers of copies and chains of fewer than `SHORTEST` residues do not count. Each complex of the
smaller set is aligned with those of the other set whose chains share most words with its chains: the chain that shares least
decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evodsp.data.similarity.pairs import MOST_CELLS, SHORTEST, WORD, Words, identity, plain
from evodsp.data.similarity.sequences import Letters
from evodsp.printing import progress

ALIGNED_WITH = 3
"""Number of sequences of the other set that a chain is aligned with."""
DEFINITION = (
    "Identity: identical residues of an alignment (BLOSUM62, gaps 11 and 1, free at the ends) as a share of the shorter "
    f"sequence. Each chain is aligned with the {ALIGNED_WITH} sequences of the other set that have most words of {WORD} "
    f"residues in common with it; sequences of under {SHORTEST} residues are compared for equality only."
)
NEAR = 0.4
"""Two chains are near with a larger share of identical residues."""
FEWEST_ALIGNED, PAIRS_ALIGNED = 30, 7_000
"""Complexes of the other set that a complex is aligned with: as many as make this number of pairs in all, but no fewer than
these. At 40 % identity the shared words do not tell well which are nearest."""
DEFINITION_OF_COMPLEXES = (
    f"{DEFINITION} Of two complexes the most alike chains count. A complex is known from another set if one complex of that "
    f"has, for each of its chains of at least {SHORTEST} residues, a chain with more than {NEAR:.0%} identity."
)

_MOST_KEPT = 1000
"""Sequences whose shared words are kept: complexes of a family share chains."""
_Chains = Mapping[str, tuple[str, ...]]
"""The distinct sequences of at least `SHORTEST` residues of each complex."""


@dataclass(frozen=True)
class Near:
    """A pair of aligned sequences, named by their chains."""

    first: str
    second: str
    identity: float
    """Their identity, 0 to 1."""


@dataclass(frozen=True)
class Overlap:
    """The overlap of two sets of chains."""

    sets: tuple[str, str]
    """The names of the two sets."""
    chains: list[str]
    """Chains that are in both sets."""
    same_sequence: list[tuple[str, str]]
    """Pairs of other chains, one of each set, with equal sequences: one pair for each such chain of the second set."""
    nearest: list[Near]
    """For each chain of the second set whose sequence is not in the first, the nearest that was aligned; most alike first."""
    alignments: int
    """Number of pairs of sequences that were aligned."""
    unknown: int
    """Number of chains whose sequences are not known."""
    covered: list[Near] | None = None
    """Complexes of the second set that are known from the first, the most alike first; None for chains."""

    @property
    def both(self) -> dict[str, str]:
        """The chains of the second set that are in the first, or have the sequence of one there, each with that one."""
        return {**{key: key for key in self.chains}, **{second: first for first, second in self.same_sequence}}

    @property
    def highest(self) -> float | None:
        """The highest identity between a chain of the one set and one of the other; None if none is known."""
        if self.chains or self.same_sequence:
            return 1.0
        return self.nearest[0].identity if self.nearest else None


def overlap(sets: tuple[str, str], first: Letters, second: Letters) -> Overlap:
    """Compare two sets of chains or complexes, given as the sequences of the chains of each key, none where they are unknown.
    The second is the smaller one."""
    known = {key: frozenset(map(plain, letters)) for key, letters in first.items() if letters}
    others = {key: frozenset(map(plain, letters)) for key, letters in second.items() if letters and key not in first}
    of_all = {known[key]: key for key in reversed(list(known))}
    same = [(of_all[chains], key) for key, chains in others.items() if chains in of_all]
    of_first, of_second = (
        {key: long for key, chains in part.items() if (long := _long(chains))}
        for part in (known, {key: chains for key, chains in others.items() if chains not in of_all})
    )
    nearest, aligned = _nearest(of_first, of_second, f"{sets[0]} and {sets[1]} sequences")
    covered, more = None, 0
    if any(len(letters) > 1 for letters in (*first.values(), *second.values())):
        covered, more = _covered(of_first, of_second, f"{sets[0]} and {sets[1]} complexes")
    unknown = sum(not letters for letters in {**first, **second}.values())
    return Overlap(sets, [key for key in second if key in first], same, nearest, aligned + more, unknown, covered)


def _long(chains: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(letters for letters in chains if len(letters) >= SHORTEST))


def _nearest(first: _Chains, second: _Chains, name: str) -> tuple[list[Near], int]:
    """For each complex of `second` the one of `first` that has the most alike chain, most alike first; and the number of
    alignments."""
    owner = {letters: key for key in reversed(list(first)) for letters in first[key]}
    wanted = dict.fromkeys(letters for chains in second.values() for letters in chains)
    near = {letters: (owner[letters], 1.0) for letters in wanted if letters in owner}
    known, new, alignments = list(owner), [letters for letters in wanted if letters not in owner], 0
    if known and new:
        candidates = _candidates([(one,) for one in known], [(one,) for one in new], ALIGNED_WITH)
        with progress(f"compared {name}", len(new)) as advance:
            for letters, rows in zip(new, candidates, strict=True):
                others = [known[row] for row in rows if len(known[row]) * len(letters) <= MOST_CELLS]
                alignments += len(others)
                if others:
                    near[letters] = max(
                        ((owner[one], identity(one, letters)) for one in others), key=lambda one: one[1]
                    )
                advance(1)
    found = []
    for key, chains in second.items():
        if ranked := [near[letters] for letters in chains if letters in near]:
            other, share = max(ranked, key=lambda one: one[1])
            found.append(Near(other, key, share))
    return sorted(found, key=lambda one: -one.identity), alignments


def _covered(first: _Chains, second: _Chains, name: str) -> tuple[list[Near], int]:
    """The complexes of `second` for each chain of which one complex of `first` has a near chain, most alike first; the identity
    is that of the chain that has least. And the number of alignments."""
    if not first or not second:
        return [], 0
    known: dict[tuple[str, str], float] = {}

    def likeness(one: str, other: str) -> float:
        if one == other:
            return 1.0
        if len(one) * len(other) > MOST_CELLS:
            return 0.0
        if (one, other) not in known:
            known[one, other] = identity(other, one)
        return known[one, other]

    entries, found = list(first), []
    candidates = _candidates(
        list(first.values()), list(second.values()), max(FEWEST_ALIGNED, PAIRS_ALIGNED // len(second))
    )
    with progress(f"compared {name}", len(second)) as advance:
        for (key, chains), rows in zip(second.items(), candidates, strict=True):
            share, nearest = NEAR, ""
            for entry in (entries[row] for row in rows):
                least = 1.0
                for one in chains:
                    least = min(least, max(likeness(one, other) for other in first[entry]))
                    if least <= share:
                        break  # another complex is nearer
                else:
                    share, nearest = least, entry
            found += [Near(nearest, key, share)] if nearest else []
            advance(1)
    return sorted(found, key=lambda one: -one.identity), len(known)


def _candidates(first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]], most: int) -> list[list[int]]:
    """For the chains of each complex of `second` the rows of the complexes of `first` with most words for each of them, best
    first, at most `most`."""
    letters = list(dict.fromkeys(one for chains in second for one in chains))
    words, column_of = Words(letters), {one: column for column, one in enumerate(letters)}
    shares_with = lru_cache(_MOST_KEPT)(words.shares_with)
    starts = np.cumsum([0, *map(len, second)])[:-1]
    columns = np.array([column_of[one] for chains in second for one in chains])
    best, best_rows = np.zeros((len(second), most)), np.full((len(second), most), -1)
    for row, chains in enumerate(first):
        shared = np.max([shares_with(one) for one in chains], axis=0)[columns]
        # The chain that shares least decides, of equals all chains together.
        points = np.minimum.reduceat(shared, starts) + 1e-3 * np.add.reduceat(shared, starts)
        better = np.flatnonzero(points > best[:, -1])
        best[better, -1], best_rows[better, -1] = points[better], row
        ranks = np.argsort(-best[better], axis=1, kind="stable")
        best[better] = np.take_along_axis(best[better], ranks, 1)
        best_rows[better] = np.take_along_axis(best_rows[better], ranks, 1)
    return [[row for row in found if row >= 0] for found in best_rows.tolist()]
