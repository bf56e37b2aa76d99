"""Which chains of a store have alignments and a structure, from one listing of each folder or from the index."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import Literal

from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.layout import StructureListing
from evodsp.errors import UserError

Lacking = Literal["alignments", "structure", "record"]
"""What a chain does not have; of a feature store, its record."""


class Presence:
    """Looks chains up in time that does not grow with their number. Whether files can be read is not checked."""

    def __init__(self, store: ChainFiles | FeatureStore) -> None:
        self.keys = store.keys()
        """Chains with alignments, sorted."""
        self._known = frozenset(self.keys)
        self._unknown: Lacking = "record" if isinstance(store, FeatureStore) else "alignments"
        self._is_resolved: Callable[[str], bool]
        if isinstance(store, FeatureStore):
            self._is_resolved = self._known.__contains__
        elif store.index is not None:
            self._is_resolved = frozenset(compress(store.index.keys[:], store.index.has_structure())).__contains__
        elif store.structure_dir is not None:
            self._listing = StructureListing(store.structure_dir)
            self._is_resolved = self._is_listed
        else:
            self._is_resolved = store.has_structure

    def lacks(self, key: str) -> Lacking | None:
        """What the chain does not have; None if it has both."""
        if key not in self._known:
            return self._unknown
        return None if self._is_resolved(key) else "structure"

    def structures_without_alignments(self, structure_dir: Path) -> list[str]:
        """Entries of a folder of structures (lower case, sorted) that have no chain with alignments."""
        return StructureListing(structure_dir).entries_without(self.keys)

    def _is_listed(self, key: str) -> bool:
        try:
            return self._listing.has(key)
        except UserError:  # a folder whose name is no chain key
            return False
