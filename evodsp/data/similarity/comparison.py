"""What comparing the keys of two sets takes, of chains and of complexes: their sequences, and copies of the nearest.

A chain has one sequence, a complex those of its chains. Which of the two a run has is decided once, where its store is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.complexes.store import ComplexStore
from evodsp.data.executors import LocalProcesses
from evodsp.data.pool import WorkerEndedError
from evodsp.data.samples.distillation import PredictedStore, chains_of
from evodsp.data.similarity.nearest import Copy, copies
from evodsp.data.similarity.nearest_complex import complex_copies
from evodsp.data.similarity.sequences import listed_sequences, read_sequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.errors import UserError
from evodsp.progress import progress

Letters = Mapping[str, tuple[str, ...]]
"""The sequences of the chains of each key; none where they are unknown."""


@runtime_checkable
class ComparedKeys(Protocol):
    """How keys of a store are compared. Processes can be sent it."""

    def listed(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The sequences of each key that a table lists."""

    def read(self, key: str) -> tuple[str, ...]:
        """The sequences of a key from its files; none if they cannot be read."""

    def copies(self, targets: Letters, training: Letters, workers: int | None) -> Iterator[tuple[str, Copy | str]]:
        """For each target, as it is done, its copy, or the reason why there is none. `workers`: see `nearest.copies`."""


def known_sequences(
    comparison: ComparedKeys, keys: Iterable[str], known: Letters, workers: int
) -> dict[str, tuple[str, ...]]:
    """The sequences of each key: those that are `known`, that a table lists, or that are read."""
    found = {key: known.get(key, ()) for key in keys}
    if unlisted := [key for key, letters in found.items() if not letters]:
        found |= comparison.listed(unlisted)
    unknown = [key for key, letters in found.items() if not letters]
    if not unknown:
        return found
    with progress("read sequences", len(unknown)) as advance:
        for at, read in LocalProcesses(workers).map(_read, [(comparison, key) for key in unknown]):
            found[unknown[at]] = () if isinstance(read, WorkerEndedError) else read
            advance(1)
    return found


def _read(comparison: ComparedKeys, key: str) -> tuple[str, ...]:
    return comparison.read(key)


@dataclass(frozen=True)
class ComparedChains:
    """Of single chains. `cache`: OpenFold's chain_data_cache.json, which has sequences."""

    source: ChainFiles | PredictedStore | FeatureStore
    cache: str | None = None

    def listed(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """See `ComparedKeys`."""
        letters = listed_sequences(self.source, keys, {}, self.cache)
        return {key: (sequence,) if sequence else () for key, sequence in letters.items()}

    def read(self, key: str) -> tuple[str, ...]:
        """See `ComparedKeys`."""
        sequence = read_sequence(self.source, key)
        return (sequence,) if sequence else ()

    def copies(self, targets: Letters, training: Letters, workers: int | None) -> Iterator[tuple[str, Copy | str]]:
        """See `ComparedKeys`."""
        store = chains_of(self.source)
        first, second = ({key: "".join(letters) for key, letters in part.items()} for part in (targets, training))
        return copies(first, second, store, store, workers)


@dataclass(frozen=True)
class ComparedComplexes:
    """Of complexes."""

    files: ComplexFiles | ComplexStore

    def listed(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """See `ComparedKeys`."""
        index = self.files.index
        rows = {key: None if index is None else index.keys.find(key) for key in keys}
        return {key: () if index is None or row is None else index.sequences_of(row) for key, row in rows.items()}

    def read(self, key: str) -> tuple[str, ...]:
        """See `ComparedKeys`."""
        try:
            return tuple(chain.sequence for chain in self.files.assembly_of(key).chains)
        except (UserError, OSError):
            return ()

    def copies(self, targets: Letters, training: Letters, workers: int | None) -> Iterator[tuple[str, Copy | str]]:
        """See `ComparedKeys`. One process makes all copies."""
        return complex_copies(targets, training, self.files.assembly_of)
