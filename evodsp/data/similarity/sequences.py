"""The sequences of keys, and two sequences side by side: their alignment, its score and identity, and the words of four
residues that they share.

An alignment is by BLOSUM62; a gap costs 11, each further residue of it 1, gaps at the ends nothing. Millions of pairs cannot
be aligned, but words can be counted: sequences that share many are worth an alignment.

Shapes: n different words of a sequence, N sequences, P paired residues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from Bio.Align import PairwiseAligner, substitution_matrices
from jaxtyping import Float64, Int32, Int64

from evodsp.data.index.metadata import read_chain_cache
from evodsp.data.pool import WorkerEndedError, with_progress
from evodsp.data.sources.chain_files import Store
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from evodsp.geometry.residues import UNKNOWN, decode, encode_sequence

WORD = 4
"""Number of residues of a word."""
MOST_CELLS = 10**8
"""Pairs whose lengths have a larger product are not aligned: it takes more than 100 MB."""
SHORTEST = 20
"""Sequences of fewer residues are compared for equality only: an alignment of a few residues is identical by chance."""
_ALL_WORDS = UNKNOWN**WORD


def plain(sequence: str) -> str:
    """The sequence with X in place of each letter that is no amino acid."""
    return decode(encode_sequence(sequence).astype(np.int8))


def paired(first: str, second: str) -> Int64[np.ndarray, "P 2"]:
    """The places in two plain sequences of the residues that their best alignment pairs; of several with one score, the first
    that Biopython finds. Which one that is depends on which sequence comes first."""
    rows = _aligner().align(first, second)[0].aligned
    blocks = [np.stack([np.arange(*one), np.arange(*other)], -1) for one, other in zip(*rows, strict=True)]
    return np.concatenate([*blocks, np.zeros((0, 2), np.int64)])


def same_residues(first: str, second: str, pairs: Int64[np.ndarray, "P 2"]) -> int:
    """The number of pairs of identical residues. X is identical to nothing."""
    return sum(first[one] == second[other] != "X" for one, other in pairs.tolist())


def identity(first: str, second: str) -> float:
    """Identical residues of the alignment of two plain sequences, as a share of the shorter one, 0 to 1."""
    return same_residues(first, second, paired(first, second)) / min(len(first), len(second))


def score(first: str, second: str) -> int:
    """The score of the best alignment of two plain sequences."""
    return int(_aligner().score(first, second))


@cache
def _aligner() -> Any:
    aligner = PairwiseAligner(mode="global", substitution_matrix=substitution_matrices.load("BLOSUM62"))
    aligner.open_gap_score, aligner.extend_gap_score = -11, -1
    aligner.end_gap_score = 0
    return aligner


class Words:
    """The words of N sequences, listed by word."""

    def __init__(self, sequences: Sequence[str]) -> None:
        words = [_words(sequence) for sequence in sequences]
        self.counts = np.array([len(found) for found in words], np.int64)
        """The number of different words of each sequence, [N]."""
        rows = np.repeat(np.arange(len(sequences)), self.counts)
        listed = np.concatenate([*words, np.zeros(0, np.int32)])
        order = np.argsort(listed, kind="stable")
        self._rows = rows[order]
        self._starts = np.searchsorted(listed[order], np.arange(_ALL_WORDS + 1))

    def shared_with(self, sequence: str) -> tuple[int, Int64[np.ndarray, " N"]]:
        """The number of different words of another sequence, and how many of them each of the N sequences has."""
        own = _words(sequence)
        having = [self._rows[self._starts[word] : self._starts[word + 1]] for word in own]
        shared = np.bincount(np.concatenate([*having, np.zeros(0, np.int64)]), minlength=len(self.counts))
        return len(own), shared

    def shares_with(self, sequence: str) -> Float64[np.ndarray, " N"]:
        """The words that each of the N sequences has in common with another, as a share of those of the one with fewer."""
        own, shared = self.shared_with(sequence)
        return shared / np.maximum(1, np.minimum(self.counts, own))


def _words(sequence: str) -> Int32[np.ndarray, " n"]:
    """The different words of a sequence without X, as numbers, in order."""
    codes = encode_sequence(sequence).astype(np.int64)
    windows = (
        np.lib.stride_tricks.sliding_window_view(codes, WORD) if len(codes) >= WORD else codes[:0].reshape(0, WORD)
    )
    known = windows[(windows < UNKNOWN).all(1)]
    return np.unique(known @ (UNKNOWN ** np.arange(WORD))).astype(np.int32)


Letters = Mapping[str, tuple[str, ...]]
"""The sequences of the chains of each key; none where they are unknown."""
Sequences = Store | StructureFolder
"""Source of the sequences of keys."""


def listed_sequences(
    source: Sequences, keys: Iterable[str], known: Letters, cache: str | None
) -> dict[str, tuple[str, ...]]:
    """The sequences of each key that `known`, the index or OpenFold's chain_data_cache.json (`cache`) lists, otherwise none."""
    found = {key: known.get(key, ()) for key in keys}
    if not isinstance(source, StructureFolder) and (index := source.index) is not None:
        rows = {key: index.keys.find(key) for key, letters in found.items() if not letters}
        found |= {key: index.sequences_of(row) for key, row in rows.items() if row is not None}
    if cache is not None and not all(found.values()):
        listed = read_chain_cache(Path(cache))
        unknown = [key for key, letters in found.items() if not letters]
        found |= {key: (listed[key].sequence,) for key in unknown if key in listed and listed[key].sequence}
    return found


def sequences(
    source: Sequences, keys: Iterable[str], known: Mapping[str, str], cache: str | None, workers: int
) -> dict[str, str]:
    """The sequence of each chain: from tables (`listed_sequences`), otherwise from one of its files; '' if it is unknown."""
    given = {key: (sequence,) for key, sequence in known.items() if sequence}
    found = with_unlisted(source, listed_sequences(source, keys, given, cache), workers)
    return {key: "".join(letters) for key, letters in found.items()}


def with_unlisted(source: Sequences, listed: Letters, workers: int) -> dict[str, tuple[str, ...]]:
    """The sequences that are listed, and of the other keys those in their files. Shows progress."""
    found = dict(listed)
    if not (unknown := [key for key, letters in found.items() if not letters]):
        return found
    for at, read in with_progress("read sequences", read_sequences, [(source, key) for key in unknown], workers):
        found[unknown[at]] = () if isinstance(read, WorkerEndedError) else read
    return found


def read_sequences(source: Sequences, key: str) -> tuple[str, ...]:
    """The sequences of a key's chains from its files; none if they cannot be read."""
    try:
        return source.sequences_of(key)
    except (UserError, OSError):
        return ()
