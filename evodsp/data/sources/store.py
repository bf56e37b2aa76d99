"""What a run asks its store of samples for: which keys it has, what one lacks, and the facts that are known without a sample.

A key is a chain (`evodsp.data.sources.chain_files`, `evodsp.data.sources.feature_store`), or an entry that stands for the
chains of an assembly (`evodsp.data.complexes.source`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.metadata import ChainFacts
from evodsp.data.records import Kind
from evodsp.data.sources.layout import StructureListing
from evodsp.errors import UserError

Lacking = Literal["alignments", "structure", "record"]
"""The part that a key lacks; in a feature store, its record."""


@runtime_checkable
class Store(Protocol):
    """Samples' data by key."""

    @property
    def kind(self) -> Kind:
        """What a key stands for."""

    @property
    def index(self) -> DataIndex | None:
        """The index of its files; None if it has none."""

    @property
    def structure_dir(self) -> Path | None:
        """The folder of structures; None if there is none."""

    @property
    def unknown(self) -> Lacking:
        """The part that a key lacks that is not among `keys`."""

    def keys(self) -> list[str]:
        """All keys, sorted. Whether files can be read is not checked."""

    def name_of(self, key: str) -> str:
        """The name that the store has a key by: the key, or that of its entry where the names of both meet."""

    def structure_lookup(self) -> Callable[[str], bool]:
        """A function that tells whether one of `keys` has a structure, in time that does not grow with their number."""

    def absence(self, key: str, lacking: Lacking) -> str:
        """The end of a message: that the store has not this part of the key, where it should be, and the fix."""

    def sequences_of(self, key: str) -> tuple[str, ...]:
        """The sequences of the key's chains, from its files. Raises UserError or OSError if they cannot be read."""

    def facts(self, key: str) -> ChainFacts:
        """What the key's structure says: sequence, resolution and release date. Raises UserError if it cannot be read."""

    def stale_sources(self) -> list[str]:
        """The sources of the index that have changed since it was made, as 'option path'; none without an index."""


def listed_chain(listing: StructureListing) -> Callable[[str], bool]:
    """A function that tells whether a chain has a structure in a folder that was listed."""

    def has(key: str) -> bool:
        try:
            return listing.has(key)
        except UserError:  # a folder whose name is no chain key
            return False

    return has
