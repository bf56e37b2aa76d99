"""Scanning a data set for its index (`evodsp.data.index.chain_index`), in parts (`evodsp.data.index.parts`).

The main process lists both folders and reads the caches. Processes list the files of each chain, and read the header of its
structure (or its first alignment, if there is no structure) where no cache knows the chain.

Chains of the index are those that have alignments, or that a cache or the list of identical chains names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evodsp.data.formats import parse_obsolete
from evodsp.data.index.chain_index import (
    EMPTY_FOLDER,
    FOLDER_OF_ITS_OWN,
    IndexContent,
    own_alignments,
    write_index,
)
from evodsp.data.index.chain_table import UNKNOWN_CLUSTER, UNKNOWN_DAY, PackedTexts
from evodsp.data.index.config import IndexConfig
from evodsp.data.index.metadata import (
    ChainFacts,
    ClusterSizes,
    EntityClusters,
    are_entities,
    facts_of_file,
    read_chain_cache,
    read_entry_cache,
    read_sets,
    table_of,
)
from evodsp.data.index.parts import Parts, sources_of
from evodsp.data.sources.alignment_database import StoredFile, read_databases, read_parts
from evodsp.data.sources.chain_folder import (
    chain_folders,
    file_of_chain,
    files_of_chain,
    first_record,
    is_alignment,
    is_empty_folder,
    order_in_msa,
    parse_alignments,
)
from evodsp.data.sources.layout import StructureListing, nested_structure
from evodsp.errors import UserError
from evodsp.geometry.alphabet import decode
from evodsp.reading.quoting import one_line


@dataclass(frozen=True, slots=True)
class ScannedChain:
    """The findings of a scan about a chain."""

    key: str
    facts: ChainFacts
    structure: str
    """Its structure file, relative to the folder; '' if there is none."""
    database: str
    """OpenFold's database with its alignments; '' for a folder."""
    files: tuple[StoredFile, ...]
    has_empty_folder: bool
    problem: str
    """The reason why its header or first alignment could not be read, '' if it could."""


def assemble(chains: Iterable[ScannedChain], duplicates: Iterable[list[str]]) -> IndexContent:
    """The arrays of an index. `chains`: sorted by key. `duplicates`: sets of identical chains."""
    keys: list[str] = []
    sequences: list[str] = []
    structures: list[str] = []
    problems: list[str] = []
    facts: list[ChainFacts] = []
    databases: dict[str, int] = {}
    names: dict[str, int] = {}
    chain_databases: list[int] = []
    first_files = [0]
    files: list[tuple[int, int, int]] = []
    for chain in chains:
        keys.append(chain.key)
        sequences.append(chain.facts.sequence)
        structures.append(chain.structure)
        problems.append(chain.problem)
        facts.append(chain.facts)
        if chain.database:
            chain_databases.append(databases.setdefault(chain.database, len(databases)))
        else:
            chain_databases.append(EMPTY_FOLDER if chain.has_empty_folder else FOLDER_OF_ITS_OWN)
        files += [(names.setdefault(file.name, len(names)), file.offset, file.length) for file in chain.files]
        first_files.append(len(files))
    name_rows, offsets, lengths = np.array(files, np.int64).reshape(-1, 3).T
    packed = PackedTexts.of(sequences)
    table = table_of(PackedTexts.of(keys), facts)
    content = IndexContent(
        table=table,
        sequences=packed,
        structures=PackedTexts.of(structures),
        problems=PackedTexts.of(problems),
        databases=PackedTexts.of(databases),
        file_names=PackedTexts.of(names),
        chain_databases=np.array(chain_databases, np.int32),
        first_files=np.array(first_files, np.int64),
        file_name_rows=name_rows.astype(np.int32),
        file_offsets=np.ascontiguousarray(offsets),
        file_lengths=np.ascontiguousarray(lengths),
    )
    has_own = own_alignments(content)
    row_of = {key: row for row, key in enumerate(keys)}
    for same in duplicates:
        rows = [row_of[key] for key in same if key in row_of]
        owner = next((row for row in rows if has_own[row]), None)
        for row in rows:
            if owner is not None and not has_own[row]:
                table.representatives[row] = owner
    return replace(content, table=table)


_FORM = 2
"""The form in which a part describes a chain. Parts of another form, of an earlier version, are scanned again."""


@dataclass(frozen=True, slots=True)
class ChainTask:
    """The known facts about a chain before its files are read."""

    key: str
    structure: str
    """The structure file of its entry, relative to the folder; '' if there is none."""
    in_cache: bool
    has_folder: bool
    database: str = ""
    """OpenFold's database with its alignments."""
    files: tuple[StoredFile, ...] = ()
    """Its files in the database."""
    needs_entity: bool = False
    """Whether the number of its entity is to be read, for clusters of entities."""
    may_be_nested: bool = False
    """Whether the folder of structures has a folder of the chain, where its structure may lie."""


def make_index(config: IndexConfig) -> int:
    """Scan and write the index of `config`, whose paths were checked, and show progress; returns the number of chains.

    Raises UserError if there are no chains, or a cache or a list is broken. A structure or alignment that cannot be read is no
    error: the index names it with the reason.
    """
    sources = sources_of(config)
    listed = {} if config.chain_data_cache is None else read_chain_cache(config.chain_data_cache)
    facts = {} if config.mmcif_cache is None else read_entry_cache(config.mmcif_cache)
    facts |= {key: _filled(known, facts.get(key, ChainFacts())) for key, known in listed.items()}
    duplicates = [] if config.duplicates is None else read_sets(config.duplicates)
    clusters = [] if config.cluster_file is None else read_sets(config.cluster_file)
    by_entity = bool(clusters) and are_entities(clusters)
    obsolete = {} if config.obsolete is None else parse_obsolete(config.obsolete)
    named = {*listed, *(key for same in duplicates for key in same)}  # mmcif_cache lists all entries of the PDB
    tasks = _tasks(config, facts, named, by_entity)
    parts = Parts(config, scan_chain, tasks, sources, _FORM)
    parts.scan("scanned chains")
    if by_entity:
        sizes = EntityClusters(clusters).sizes(found["entity"] for _, found in parts.scanned())
    else:
        of_chain = ClusterSizes(clusters)
        sizes = [of_chain.of(task.key) for task in tasks]
    scanned = (
        _with_facts(task, found, facts, size) for (task, found), size in zip(parts.scanned(), sizes, strict=True)
    )
    parts.before_writing()
    write_index(config.output, assemble(scanned, duplicates), sources, obsolete)
    parts.remove()
    return len(tasks)


def _filled(known: ChainFacts, other: ChainFacts) -> ChainFacts:
    """`known`, with the missing facts taken from `other`."""
    return ChainFacts(
        known.sequence or other.sequence,
        other.resolution if math.isnan(known.resolution) else known.resolution,
        other.release_day if known.release_day == UNKNOWN_DAY else known.release_day,
        other.cluster_size if known.cluster_size == UNKNOWN_CLUSTER else known.cluster_size,
    )


def _tasks(
    config: IndexConfig, facts: Mapping[str, ChainFacts], named: set[str], needs_entity: bool
) -> list[ChainTask]:
    """The chains of the index, sorted by key: those with alignments and `named`. Raises UserError if none has alignments."""
    in_database = {key: database for database in read_databases(config.alignment_dir) for key in database.entries}
    folders = set() if in_database else set(chain_folders(config.alignment_dir))
    keys = sorted({*folders, *in_database, *named})
    if not folders and not in_database:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another --alignment_dir")
    listing = StructureListing(config.structure_dir)
    tasks = []
    for key in keys:
        try:
            structure = listing.of_chain(key) or ""
            may_be_nested = not structure and key in listing.folders
        except UserError:  # the name is no chain key: it has no structure, and training reports it so
            structure, may_be_nested = "", False
        name, files = in_database[key].files(key) if key in in_database else ("", [])
        of_key = (key, structure, key in facts, key in folders, name, tuple(files))
        tasks.append(ChainTask(*of_key, needs_entity, may_be_nested))
    return tasks


def scan_chain(alignment_dir: Path, structure_dir: Path, task: ChainTask) -> dict[str, Any]:
    """The entry of a chain in its part: its files, and its header's facts if no cache has them. `_FORM` numbers this form."""
    files, structure = list(task.files), task.structure
    facts, entity, problem, is_empty = ChainFacts(), "", "", False
    try:
        if task.has_folder:
            found = files_of_chain(alignment_dir / task.key)
            is_empty = not found and is_empty_folder(alignment_dir / task.key)
            files = [StoredFile(name, 0, length) for name, length in found.items()]
        if task.may_be_nested and (path := nested_structure(structure_dir, task.key)) is not None:
            structure = str(path.relative_to(structure_dir))
        if structure and (task.needs_entity or not task.in_cache):
            facts, entity = facts_of_file(structure_dir / structure, task.key)
        elif not task.in_cache:
            facts = ChainFacts(sequence=_first_row(alignment_dir, task, files))
    except (UserError, OSError) as error:
        problem = one_line(str(error))
    columns = {"files": files, "empty": is_empty, "structure": structure, "facts": dataclasses.astuple(facts)}
    return {**columns, "entity": entity, "problem": problem}


def _first_row(alignment_dir: Path, task: ChainTask, files: list[StoredFile]) -> str:
    """The first row of the chain's first alignment; '' if it has none."""
    named = {file: Path(file.name).name for file in files}
    first = min(
        (file for file in files if is_alignment(named[file])), key=lambda file: order_in_msa(named[file]), default=None
    )
    if first is None:
        return ""
    if task.database:
        parts = read_parts(alignment_dir / task.database, task.key, [first], task.database)
        ((source, _, data),) = parts
    else:
        source = str(file_of_chain(alignment_dir / task.key, first.name))
        data = first_record(Path(source))
    alignments = parse_alignments([(source, data)])
    return decode(alignments[0].residues[0]) if alignments else ""


def _with_facts(
    task: ChainTask, found: dict[str, Any], cached: dict[str, ChainFacts], cluster_size: int
) -> ScannedChain:
    facts = cached.get(task.key) or ChainFacts(*found["facts"])
    if cluster_size != UNKNOWN_CLUSTER:
        facts = replace(facts, cluster_size=cluster_size)
    files = tuple(StoredFile(*file) for file in found["files"])
    where = (found["structure"], task.database, files, found["empty"])
    return ScannedChain(task.key, facts, *where, found["problem"])
