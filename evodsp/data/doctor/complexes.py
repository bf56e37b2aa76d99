"""What reading a complex as training does shows about it: its chains, their copies, and the rows that pair them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from evodsp.data.complexes.source import ComplexFiles, ParsedComplex
from evodsp.data.complexes.store import ComplexStore
from evodsp.data.doctor.complex_leaks import DEFINITION_OF_COMPLEXES, complex_overlap
from evodsp.data.doctor.examination import Examined, Unit, packed_size, read_bad
from evodsp.data.doctor.leaks import Overlap
from evodsp.data.records import Assembly
from evodsp.data.similarity.comparison import ComparedComplexes, Letters
from evodsp.errors import UserError
from evodsp.geometry.residues import CA

SAME_PLACE = 0.5
"""Two CA atoms lie in the same place below this distance, in Å."""
_MOST_NOTED = 3
"""Pairs of copies in the same place that are named for one complex."""


@dataclass(frozen=True)
class ComplexExaminer:
    """Looks at complexes."""

    store: ComplexFiles | ComplexStore
    unit: Unit = "complex"
    definition: str = DEFINITION_OF_COMPLEXES

    @property
    def comparison(self) -> ComparedComplexes:
        """See `Examiner`."""
        return ComparedComplexes(self.store)

    @property
    def place(self) -> str:
        """See `Examiner`."""
        if isinstance(self.store, ComplexStore):
            return self.store.address
        index = "no index" if self.store.index is None else self.store.index.path
        return f"{self.store.alignment_dir}, {self.store.structure_dir}, {self.store.assembly_name}, {index}"

    def examine(self, key: str) -> Examined:
        """See `Examiner`."""
        begun = time.perf_counter()
        try:
            parsed = self.store.parsed(key)
        except UserError as error:
            return read_bad(key, error)
        seconds = time.perf_counter() - begun
        chains = parsed.assembly.chains
        # Chains of one sequence have one MSA, which a store would keep once.
        of_sequence = {chain.sequence: (own, chain) for own, chain in zip(parsed.chains, chains, strict=True)}
        notes = [f"chain {chain.chain_id}: {note}" for chain in chains for note in chain.notes]
        released = chains[0].release_date
        return Examined(
            key,
            "good",
            sequences=tuple(chain.sequence for chain in chains),
            resolution=chains[0].resolution or 0.0,
            release_date="" if released is None else released.isoformat(),
            depth=sum(own.msa.num_alignments for own, _ in of_sequence.values()),
            packed_bytes=sum(packed_size(own.msa, chain) for own, chain in of_sequence.values()),
            seconds=seconds,
            notes=(*dict.fromkeys(notes), *copies_in_one_place(parsed.assembly)),
            pairing_notes=tuple(self._of_pairing(parsed)),
        )

    def overlap(self, sets: tuple[str, str], first: Letters, second: Letters) -> Overlap:
        """See `Examiner`."""
        return complex_overlap(sets, first, second)

    def differs_from_index(self, key: str) -> bool:
        """False: a complex that differs cannot be read, and the reason says so."""
        return False

    def _of_pairing(self, parsed: ParsedComplex) -> Iterator[str]:
        """What is wrong with the rows that pair the chains of several sequences, one remark for each sequence."""
        first_of = {own.query.letters: own for own in reversed(parsed.chains)}
        if len(first_of) == 1:
            return  # copies are not paired
        for own in reversed(first_of.values()):
            rows = 0 if own.pairing is None else len(own.pairing.keys) - 1
            nameless = 0 if own.pairing is None else sum(not key for key in own.pairing.keys[1:])
            if not rows:
                yield f"chain {own.query.name}: no rows to pair with other chains ({self.store.rule.names})"
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
