"""What comparing the keys of two sets takes: their sequences, and copies of the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from evodsp.data.similarity.nearest import Copy, copies
from evodsp.data.similarity.sequences import Letters, listed_sequences, read_sequences, with_unlisted
from evodsp.data.sources.opening import Records


@dataclass(frozen=True)
class Compared:
    """The keys of a store, to be compared by the sequences of their chains. Processes can be sent it.

    `cache`: OpenFold's chain_data_cache.json, which has sequences of chains.
    """

    store: Records
    cache: str | None = None

    def listed(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The sequences of each key that a table lists; none of the others."""
        return listed_sequences(self.store, keys, {}, self.cache)

    def read(self, key: str) -> tuple[str, ...]:
        """The sequences of a key from its files; none if they cannot be read."""
        return read_sequences(self.store, key)

    def sequences(self, keys: Iterable[str], known: Letters, workers: int) -> dict[str, tuple[str, ...]]:
        """The sequences of each key: those that are `known`, that a table lists, or that are read."""
        return with_unlisted(self.store, listed_sequences(self.store, keys, known, self.cache), workers)

    def copies(self, targets: Letters, training: Letters, workers: int | None) -> Iterator[tuple[str, Copy | str]]:
        """For each target, as it is done, its copy, or the reason why there is none. `workers`: see `nearest.copies`."""
        return copies(targets, training, self.store.assembly_of, self.store.assembly_of, workers)
