"""The overlap of a run's training, validation and test chains: shared chains, equal sequences, and the likeness of the
others.

The identity of two sequences is the number of identical residues in their alignment by BLOSUM62 (a gap costs 11, each further
residue of it 1, gaps at the ends nothing), as a share of the shorter sequence, as in CD-HIT. X is identical to nothing.

Millions of pairs cannot be aligned. So each chain of the smaller set is aligned only with the few sequences of the other set
that share most words of four residues with it, as a share of the words of the one that has fewer. Sequences without a common
word are not aligned: nobody would call them a leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from Bio.Align import PairwiseAligner, substitution_matrices
from jaxtyping import Int32

from evodsp.data.executors import LocalProcesses
from evodsp.data.index.metadata import read_chain_cache
from evodsp.data.index.scan import first_record
from evodsp.data.pool import WorkerEndedError
from evodsp.data.samples.distillation import PredictedStore, chains_of
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.chain_folder import alignment_files, parse_alignment_file
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.errors import UserError
from evodsp.geometry.alphabet import UNKNOWN, decode, encode_sequence
from evodsp.progress import progress


def sequences(
    source: ChainFiles | PredictedStore | FeatureStore,
    keys: Iterable[str],
    known: Mapping[str, str],
    cache: str | None,
    workers: int,
) -> dict[str, str]:
    """The sequence of each chain, '' if it is unknown.

    It is taken from `known`, the index or OpenFold's chain_data_cache.json (`cache`), otherwise from the first row of one of
    the chain's files.
    """
    store = chains_of(source)
    found = {key: known.get(key, "") for key in keys}
    if isinstance(store, ChainFiles) and store.index is not None:
        index = store.index
        for key in [key for key, sequence in found.items() if not sequence]:
            row = index.keys.find(key)
            found[key] = "" if row is None else index.sequence(row)
    unknown = [key for key, sequence in found.items() if not sequence]
    if cache is not None and unknown:
        listed = read_chain_cache(Path(cache))
        found |= {key: listed[key].sequence for key in unknown if key in listed}
        unknown = [key for key in unknown if not found[key]]
    with progress("read sequences", len(unknown)) as advance:
        for _, read in LocalProcesses(workers).map(_sequence, [(store, key) for key in unknown]):
            if not isinstance(read, WorkerEndedError):
                found[read[0]] = read[1]
            advance(1)
    return found


def _sequence(store: ChainFiles | FeatureStore, key: str) -> tuple[str, str]:
    """The chain and its sequence: the first row of its first alignment. No more of the file is read than that takes."""
    try:
        if isinstance(store, FeatureStore):
            return key, store.parsed(key, with_hits=False).chain.sequence
        for path in alignment_files(store.alignment_dir / key):
            for alignment in parse_alignment_file(str(path), first_record(path)):
                if len(alignment.residues):
                    return key, decode(alignment.residues[0])
        return key, store.query(key).letters
    except (UserError, OSError):
        return key, ""


WORD = 4
"""Number of residues of a word."""
ALIGNED_WITH = 3
"""Number of sequences of the other set that a chain is aligned with."""
SHORTEST = 20
"""Shorter sequences are compared for equality only: an alignment of a few residues is identical by chance."""
MOST_CELLS = 10**8
"""Pairs whose lengths have a larger product are not aligned: it takes more than 100 MB."""
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
            of_first.setdefault(_plain(sequence), key)
    plain = {key: _plain(sequence) for key, sequence in second.items() if sequence and key not in first}
    same = [(of_first[sequence], key) for key, sequence in plain.items() if sequence in of_first]
    left = {key: sequence for key, sequence in plain.items() if sequence not in of_first and len(sequence) >= SHORTEST}
    others = {key: sequence for sequence, key in of_first.items() if len(sequence) >= SHORTEST}
    nearest, alignments = _nearest(others, left, f"{sets[0]} and {sets[1]} sequences")
    unknown = sum(not sequence for sequence in {**first, **second}.values())
    return Overlap(sets, chains, same, sorted(nearest, key=lambda near: -near.identity), alignments, unknown)


def identity(first: str, second: str) -> float:
    """The identity of two sequences, 0 to 1."""
    rows = _aligner().align(first, second)[0].aligned
    same = sum(
        a == b != "X"
        for (begin, end), (start, _) in zip(*rows, strict=True)
        for a, b in zip(first[begin:end], second[start:], strict=False)
    )
    return same / min(len(first), len(second))


@cache
def _aligner() -> Any:
    aligner = PairwiseAligner(mode="global", substitution_matrix=substitution_matrices.load("BLOSUM62"))
    aligner.open_gap_score, aligner.extend_gap_score = -11, -1
    aligner.end_gap_score = 0
    return aligner


def _plain(sequence: str) -> str:
    """The sequence with X in place of each letter that is no amino acid."""
    return decode(encode_sequence(sequence).astype(np.int8))


def _nearest(first: Mapping[str, str], second: Mapping[str, str], name: str) -> tuple[list[Near], int]:
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
    words = [_words(sequence) for sequence in second]
    counts = np.array([len(found) for found in words])
    rows = np.repeat(np.arange(len(second)), counts)
    listed = np.concatenate([*words, np.zeros(0, np.int32)])
    order = np.argsort(listed, kind="stable")
    rows, listed = rows[order], listed[order]
    starts = np.searchsorted(listed, np.arange(_ALL_WORDS + 1))
    best = np.zeros((len(second), ALIGNED_WITH))
    best_rows = np.full((len(second), ALIGNED_WITH), -1)
    for row, sequence in enumerate(first):
        own = _words(sequence)
        having = [rows[starts[word] : starts[word + 1]] for word in own]
        shared = np.bincount(np.concatenate([*having, np.zeros(0, np.int64)]), minlength=len(second))
        share = shared / np.maximum(1, np.minimum(counts, len(own)))
        better = np.flatnonzero(share > best[:, -1])
        best[better, -1], best_rows[better, -1] = share[better], row
        ranks = np.argsort(-best[better], axis=1, kind="stable")
        best[better] = np.take_along_axis(best[better], ranks, 1)
        best_rows[better] = np.take_along_axis(best_rows[better], ranks, 1)
    return [[int(row) for row in found if row >= 0] for found in best_rows]


_ALL_WORDS = UNKNOWN**WORD


def _words(sequence: str) -> Int32[np.ndarray, " n"]:
    """The different words of a sequence without X, as numbers, in order."""
    codes = encode_sequence(sequence).astype(np.int64)
    windows = (
        np.lib.stride_tricks.sliding_window_view(codes, WORD) if len(codes) >= WORD else codes[:0].reshape(0, WORD)
    )
    known = windows[(windows < UNKNOWN).all(1)]
    return np.unique(known @ (UNKNOWN ** np.arange(WORD))).astype(np.int32)
