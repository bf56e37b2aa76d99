"""Opening records: files in two folders, or a feature store, of single chains or of complexes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evodsp.config import ArrangementName
from evodsp.data.complexes.pairing import RULES, RuleName, say_query_paired
from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.index.data_index import DataIndex
from evodsp.data.records import CHAINS, COMPLEXES, Kind
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.errors import UserError

KIND_OF: dict[ArrangementName, Kind] = {"monomer": CHAINS, "multimer": COMPLEXES}
"""What a key stands for in the data of each arrangement of the model."""
Records = ChainFiles | ComplexFiles | FeatureStore


@dataclass(frozen=True)
class Unit:
    """What a key stands for; for complexes also the assembly that is read and the rule by which rows are paired."""

    kind: Kind = CHAINS
    assembly: str | None = "1"
    pairing: RuleName = "species"


def open_files(
    alignment_dir: str | Path,
    structure_dir: str | Path,
    index: str | Path | None = None,
    unit: Unit = Unit(),
    min_plddt: float | None = None,
    warn: Callable[[str, str], None] = say_query_paired,
) -> ChainFiles | ComplexFiles:
    """The records in two folders. `index`: of both. Other arguments: see `ChainFiles` and `ComplexFiles`.

    Raises UserError if a folder or the index is missing, or if the index is of another unit.
    """
    opened = None if index is None else DataIndex(index, unit.kind)
    if unit.kind == CHAINS:
        return ChainFiles(alignment_dir, structure_dir, opened, min_plddt)
    rule = RULES[unit.pairing]
    return ComplexFiles(alignment_dir, structure_dir, unit.assembly, rule, opened, warn, min_plddt)


def open_store(
    address: str,
    unit: Unit = Unit(),
    warn: Callable[[str, str], None] = say_query_paired,
    setting: str = "data.store",
) -> FeatureStore:
    """The feature store at an address, which `setting` names. Raises UserError if there is none, or if it was built of another
    unit than the run's."""
    store = FeatureStore(address, unit.kind, warn)
    if unit.kind == COMPLEXES:
        names = (("assembly", store.assembly, unit.assembly), ("pairing", store.plan["pairing"], unit.pairing))
        for name, built, wanted in names:
            if built != wanted:
                shown, asked = ("null" if value is None else value for value in (built, wanted))
                raise UserError(
                    f"{setting} is {address}, built with --{name} {shown}, but data.{name} is {asked}; set it to {shown}, "
                    f"or build a store with --{name} {asked}"
                )
    return store
