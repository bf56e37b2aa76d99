"""The overlap of a run's training, validation and test chains: shared chains, equal sequences, and the likeness of the
others.

The identity of two sequences is the number of identical residues in their alignment by BLOSUM62 (a gap costs 11, each further
residue of it 1, gaps at the ends nothing), as a share of the shorter sequence, as in CD-HIT. X is identical to nothing.

Millions of pairs cannot be aligned. So each chain of the smaller set is aligned only with the few sequences of the other set
that share most words of four residues with it, as a share of the words of the one that has fewer. Sequences without a common
word are not aligned: nobody would call them a leak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evodsp.data.similarity.pairs import MOST_CELLS, SHORTEST, WORD, Words, identity, plain
from evodsp.progress import progress

ALIGNED_WITH = 3
"""Number of sequences of the other set that a chain is aligned with."""
DEFINITION = (
    "Identity: identical residues of an alignment (BLOSUM62, gaps 11 and 1, free at the ends) as a share of the shorter "
    f"sequence. Each chain is aligned with the {ALIGNED_WITH} sequences of the other set that have most words of {WORD} "
    f"residues in common with it; sequences of under {SHORTEST} residues are compared for equality only."
)


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
    """Complexes of the second set that are known from the first (`complex_leaks`), the most alike first; None for chains."""

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


def overlap(sets: tuple[str, str], first: Mapping[str, str], second: Mapping[str, str]) -> Overlap:
    """Compare two sets of chains, given as their sequences by key, '' where it is unknown. The second is the smaller one."""
    chains = [key for key in second if key in first]
    of_first: dict[str, str] = {}
    for key, sequence in first.items():
        if sequence:
            of_first.setdefault(plain(sequence), key)
    letters = {key: plain(sequence) for key, sequence in second.items() if sequence and key not in first}
    same = [(of_first[sequence], key) for key, sequence in letters.items() if sequence in of_first]
    left = {
        key: sequence for key, sequence in letters.items() if sequence not in of_first and len(sequence) >= SHORTEST
    }
    others = {key: sequence for sequence, key in of_first.items() if len(sequence) >= SHORTEST}
    nearest, alignments = nearest_sequences(others, left, f"{sets[0]} and {sets[1]} sequences")
    unknown = sum(not sequence for sequence in {**first, **second}.values())
    return Overlap(sets, chains, same, sorted(nearest, key=lambda near: -near.identity), alignments, unknown)


def nearest_sequences(first: Mapping[str, str], second: Mapping[str, str], name: str) -> tuple[list[Near], int]:
    """For each chain of `second`, the nearest chain of `first` that was aligned with it; and the number of alignments."""
    if not first or not second:
        return [], 0
    keys, candidates = list(first), _candidates(list(first.values()), list(second.values()))
    found, alignments = [], 0
    with progress(f"compared {name}", len(second)) as advance:
        for (key, sequence), rows in zip(second.items(), candidates, strict=True):
            pairs = [(keys[row], first[keys[row]]) for row in rows]
            pairs = [(other, letters) for other, letters in pairs if len(letters) * len(sequence) <= MOST_CELLS]
            alignments += len(pairs)
            nears = [Near(other, key, identity(letters, sequence)) for other, letters in pairs]
            found += [max(nears, key=lambda near: near.identity)] if nears else []
            advance(1)
    return found, alignments


def _candidates(first: list[str], second: list[str]) -> list[list[int]]:
    """For each sequence of `second`, the rows of the sequences of `first` that share most words with it, best first."""
    words = Words(second)
    best = np.zeros((len(second), ALIGNED_WITH))
    best_rows = np.full((len(second), ALIGNED_WITH), -1)
    for row, sequence in enumerate(first):
        own, shared = words.shared_with(sequence)
        share = shared / np.maximum(1, np.minimum(words.counts, own))
        better = np.flatnonzero(share > best[:, -1])
        best[better, -1], best_rows[better, -1] = share[better], row
        ranks = np.argsort(-best[better], axis=1, kind="stable")
        best[better] = np.take_along_axis(best[better], ranks, 1)
        best_rows[better] = np.take_along_axis(best_rows[better], ranks, 1)
    return [[int(row) for row in found if row >= 0] for found in best_rows]
