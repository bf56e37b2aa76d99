"""What reading a chain or a complex as training does shows about it."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.doctor.leaks import DEFINITION, DEFINITION_OF_COMPLEXES
from evodsp.data.records import CHAINS, ONE_OF, Assembly
from evodsp.data.similarity.comparison import Compared
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.parsed import Parsed
from evodsp.data.sources.query_check import QueryMismatch
from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.printing import one_line

State = Literal["good", "mismatching", "unreadable"]
SAME_PLACE = 0.5
"""Two CA atoms lie in the same place below this distance, in Å."""
_MOST_NOTED = 3
"""Pairs of copies in the same place that are named for one complex."""


@dataclass(frozen=True)
class Examined:
    """A chain or complex that was read, or the reason why it could not be read. Unknown numbers of a bad one are 0."""

    key: str
    state: State
    reason: str = ""
    sequences: tuple[str, ...] = ()
    """The sequences of its chains."""
    resolution: float = math.nan
    """Its resolution in Å; 0 if the method has none."""
    release_date: str = ""
    depth: int = 0
    """Number of different sequences in the merged MSA; of a complex in those of all chains."""
    packed_bytes: int = 0
    """Its estimated size in a store: the rows of its MSAs and its coordinates, packed by zlib."""
    seconds: float = 0.0
    """The time that reading and merging took."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how its structure was read."""
    pairing_notes: tuple[str, ...] = ()
    """Remarks for the user on its rows for pairing."""


@dataclass(frozen=True)
class Examiner(Compared):
    """Looks at the keys of a store. Processes can be sent it."""

    @property
    def unit(self) -> str:
        """What a key stands for, in the singular."""
        return ONE_OF[self.store.kind]

    @property
    def definition(self) -> str:
        """What comparing takes for alike, for reports."""
        return DEFINITION if self.store.kind == CHAINS else DEFINITION_OF_COMPLEXES

    @property
    def place(self) -> str:
        """The folders and the index, or the store, that it reads, for reports."""
        store = self.store
        if isinstance(store, FeatureStore):
            return store.address
        folders = [str(store.alignment_dir), str(store.structure_dir)]
        assembly = [store.assembly_name] if isinstance(store, ComplexFiles) else []
        return ", ".join([*folders, *assembly, "no index" if store.index is None else str(store.index.path)])

    def examine(self, key: str) -> Examined:
        """Read one. An error that the user can repair is in the result; any other is raised."""
        begun = time.perf_counter()
        try:
            parsed = self.store.parsed(key)
        except UserError as error:
            return Examined(
                key, "mismatching" if isinstance(error, QueryMismatch) else "unreadable", one_line(str(error))
            )
        seconds = time.perf_counter() - begun
        assembly, chains = parsed.assembly, parsed.assembly.chains
        # Chains of one sequence have one MSA, which a store keeps once, as it does the rows for pairing.
        of_sequence = parsed.of_each_sequence.values()
        rows = [one.msa for own in of_sequence for one in (own.msa, own.pairing) if one is not None]
        kept = [*(one.astype(np.uint8) for one in rows), *(chain.positions for chain in chains)]
        where = ("" if assembly.key is not None else f"chain {chain.chain_id}: " for chain in chains)
        notes = [f"{place}{note}" for place, chain in zip(where, chains, strict=True) for note in chain.notes]
        released = chains[0].release_date
        return Examined(
            key,
            "good",
            sequences=tuple(chain.sequence for chain in chains),
            resolution=chains[0].resolution or 0.0,
            release_date="" if released is None else released.isoformat(),
            depth=sum(own.msa.num_alignments for own in of_sequence),
            packed_bytes=sum(len(zlib.compress(array.tobytes(), 1)) for array in kept),
            seconds=seconds,
            notes=(*dict.fromkeys(notes), *copies_in_one_place(assembly)),
            pairing_notes=tuple(self._of_pairing(parsed)),
        )

    def differs_from_index(self, key: str) -> bool:
        """Whether the alignments of a key are other files than its index says; False without one."""
        store = self.store
        if isinstance(store, FeatureStore) or store.index is None:
            return False
        return store.index.differs(store.name_of(key), store.alignment_dir)

    def _of_pairing(self, parsed: Parsed) -> Iterator[str]:
        """What is wrong with the rows that pair the chains of several sequences, one remark for each sequence."""
        rule, first_of = self.store.rule, parsed.of_each_sequence
        if rule is None or len(first_of) == 1:
            return  # copies are not paired
        for own in first_of.values():
            rows = 0 if own.pairing is None else len(own.pairing.keys) - 1
            nameless = 0 if own.pairing is None else sum(not key for key in own.pairing.keys[1:])
            if not rows:
                yield f"chain {own.query.name}: no rows to pair with other chains ({rule.names})"
            elif nameless:
                yield f"chain {own.query.name}: {nameless:,} of {rows:,} rows have no name to be paired by"


def copies_in_one_place(assembly: Assembly) -> list[str]:
    """Remarks on chains of one sequence of which most CA atoms lie in the same places: an operator that moves nothing, or a
    chain that the file has twice."""
    found = []
    for (name, one), (other_name, other) in combinations(zip(assembly.names, assembly.chains, strict=True), 2):
        if one.sequence != other.sequence:
            continue
        both = (one.mask[:, CA] > 0.5) & (other.mask[:, CA] > 0.5)
        apart = np.linalg.norm(one.positions[both, CA] - other.positions[both, CA], axis=-1)
        if (same := int((apart < SAME_PLACE).sum())) > both.sum() / 2:
            found.append(f"chains {name} and {other_name} lie in the same place ({same:,} of {both.sum():,} CA atoms)")
    more = [f"{len(found) - _MOST_NOTED:,} more pairs of chains lie in the same place"] if found[_MOST_NOTED:] else []
    return found[:_MOST_NOTED] + more
