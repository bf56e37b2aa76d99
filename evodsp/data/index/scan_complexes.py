"""Scanning a data set for its index of complexes (`evodsp.data.index.complex_index`), in parts (`evodsp.data.index.parts`).

The main process lists both folders. Processes read the assembly of each entry as training does, with all atoms, because a chain
without coordinates is no chain of a complex. Rows are the entries that have alignments of a chain, or of one that is identical
to one of its chains by the list of duplicates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from evodsp.data.formats.mmcif import read_assembly, read_header
from evodsp.data.index.chain_table import PackedTexts, day_of
from evodsp.data.index.complex_index import ComplexColumns, write_complexes
from evodsp.data.index.config import IndexConfig
from evodsp.data.index.metadata import (
    ChainFacts,
    ClusterSizes,
    EntityClusters,
    are_entities,
    read_sets,
    smallest_cluster,
    table_of,
)
from evodsp.data.index.parts import Parts, sources_of
from evodsp.data.sources.alignment_database import read_databases
from evodsp.data.sources.chain_folder import chain_folders
from evodsp.data.sources.layout import StructureListing, split_key
from evodsp.errors import UserError
from evodsp.reading.quoting import one_line

_FORM = "complexes 1"
"""The form in which a part describes a complex. Parts of another form are scanned again."""


@dataclass(frozen=True, slots=True)
class ComplexTask:
    """What is known about an entry before its structure is read."""

    entry: str
    structure: str
    """Its structure file, relative to the folder; '' if there is none."""
    assembly: str | None
    needs_entities: bool
    """Whether the number of each chain's entity is to be read, for clusters of entities."""


def make_complex_index(config: IndexConfig) -> int:
    """Scan and write the index of `config`, whose paths were checked, and show progress; returns the number of entries.

    Raises UserError if there are none, or a list is broken. A structure that cannot be read is no error: the index names it
    with the reason.
    """
    sources = sources_of(config)
    aligned = _aligned(config.alignment_dir)
    duplicates = [] if config.duplicates is None else read_sets(config.duplicates)
    clusters = [] if config.cluster_file is None else read_sets(config.cluster_file)
    by_entity = bool(clusters) and are_entities(clusters)
    lenders = _lenders(duplicates, aligned)
    listing = StructureListing(config.structure_dir)
    entries = sorted({split_key(key)[0] for key in (*aligned, *lenders)})
    if not entries:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another --alignment_dir")
    tasks = [ComplexTask(entry, listing.of_entry(entry) or "", config.assembly, by_entity) for entry in entries]
    parts = Parts(config, scan_complex, tasks, sources, _FORM)
    parts.scan("scanned complexes")
    found = [one for _, one in parts.scanned()]
    parts.before_writing()
    keys = PackedTexts.of(entries)
    sizes = _cluster_sizes(found, clusters, by_entity)
    facts = [
        ChainFacts("".join(one["sequences"]), one["resolution"], one["release_day"], smallest_cluster(of_chains))
        for one, of_chains in zip(found, sizes, strict=True)
    ]
    content = _columns(tasks, found, aligned, lenders, sizes)
    write_complexes(config.output, table_of(keys, facts), content, sources, config.assembly)
    parts.remove()
    return len(entries)


def scan_complex(alignment_dir: Path, structure_dir: Path, task: ComplexTask) -> dict[str, Any]:
    """The entry of a complex in its part: its chains, or the reason why they could not be read. `_FORM` numbers this form."""
    unread = ChainFacts()
    found: dict[str, Any] = {
        "names": [], "keys": [], "sequences": [], "entities": [], "method": "", "problem": "",
        "resolution": unread.resolution, "release_day": unread.release_day,
    }  # fmt: skip
    if not task.structure:
        return found
    path = structure_dir / task.structure
    try:
        assembly = read_assembly(path, task.assembly)
        ids = [chain.chain_id for chain in assembly.chains]
        entities = read_header(path).entities if task.needs_entities else {}
    except (UserError, OSError) as error:
        return {**found, "problem": one_line(str(error))}
    first = assembly.chains[0]
    return {
        "names": list(assembly.names),
        "keys": [f"{task.entry}_{chain_id}" for chain_id in ids],
        "sequences": [chain.sequence for chain in assembly.chains],
        "entities": [f"{task.entry}_{entities[chain_id]}" if chain_id in entities else "" for chain_id in ids],
        "method": first.method,
        "problem": "",
        "resolution": first.resolution or 0.0,
        "release_day": day_of(first.release_date),
    }


def _aligned(alignment_dir: Path) -> frozenset[str]:
    """The keys of the chains that have alignments, if they are keys."""
    databases = read_databases(alignment_dir)
    keys = {key for database in databases for key in database.entries} if databases else chain_folders(alignment_dir)
    return frozenset(key for key in keys if key.strip("_") == key)


def _lenders(duplicates: list[list[str]], aligned: Collection[str]) -> dict[str, str]:
    """For each chain of a set of identical chains one that has alignments; chains of sets without any are absent."""
    lenders: dict[str, str] = {}
    for same in duplicates:
        if (lender := next((key for key in same if key in aligned), None)) is not None:
            lenders |= {key: lender for key in same if key.strip("_") == key}
    return lenders


def owners(keys: list[str], sequences: list[str], aligned: Collection[str], lenders: Mapping[str, str]) -> list[str]:
    """For each chain of a complex the key of the chain whose alignments it has, '' if there is none: the first of its sequence
    that has alignments, else one that is identical to a chain of its sequence."""
    owner_of: dict[str, str] = {}
    for has in ({key: key for key in keys if key in aligned}, lenders):
        for key, letters in zip(keys, sequences, strict=True):
            if key in has:
                owner_of.setdefault(letters, has[key])
    return [owner_of.get(letters, "") for letters in sequences]


def _cluster_sizes(found: list[dict[str, Any]], clusters: list[list[str]], by_entity: bool) -> list[list[int]]:
    """For each entry the sizes of its chains' clusters; UNKNOWN_CLUSTER where unknown."""
    if by_entity:
        sizes = iter(EntityClusters(clusters).sizes(entity for one in found for entity in one["entities"]))
        return [[next(sizes) for _ in one["keys"]] for one in found]
    of_chain = ClusterSizes(clusters)
    return [[of_chain.of(key) for key in one["keys"]] for one in found]


def _columns(
    tasks: list[ComplexTask],
    found: list[dict[str, Any]],
    aligned: Collection[str],
    lenders: Mapping[str, str],
    sizes: list[list[int]],
) -> ComplexColumns:
    alignments = [owners(one["keys"], one["sequences"], aligned, lenders) for one in found]
    problems = []
    for one, of_chains in zip(found, alignments, strict=True):
        without = dict.fromkeys(key for key, owner in zip(one["keys"], of_chains, strict=True) if not owner)
        problems.append(one["problem"] or (f"no alignments of {', '.join(without)}" if without else ""))
    return ComplexColumns(
        structures=PackedTexts.of(task.structure for task in tasks),
        methods=PackedTexts.of(one["method"] for one in found),
        problems=PackedTexts.of(problems),
        chain_names=PackedTexts.of(name for one in found for name in one["names"]),
        chain_sequences=PackedTexts.of(letters for one in found for letters in one["sequences"]),
        chain_alignments=PackedTexts.of(owner for of_chains in alignments for owner in of_chains),
        are_aligned=np.array([all(of_chains) for of_chains in alignments], np.int64),
        chain_clusters=np.array([size for of_chains in sizes for size in of_chains], np.int64),
        first_chains=np.array([0, *accumulate(len(one["keys"]) for one in found)], np.int64),
    )
