"""Scanning a data set for its index (`evodsp.data.index.data_index`), in parts (`evodsp.data.index.parts`).

The main process lists both folders and reads the caches. Processes list the files of each chain, and read the header of its
structure (or its first alignment, if there is no structure) where no cache knows the chain. Of a complex they read the assembly
as training does, with all atoms, because a chain without coordinates is no chain of a complex.

Chains of the index are those that have alignments, or that a cache or the list of identical chains names. Complexes are the
entries that have alignments of a chain, or of one that is identical to one of its chains by the list.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evodsp.data.formats import parse_obsolete
from evodsp.data.formats.mmcif import read_assembly, read_header
from evodsp.data.index.chain_table import UNKNOWN_CLUSTER, UNKNOWN_DAY, PackedTexts, day_of
from evodsp.data.index.config import IndexConfig
from evodsp.data.index.data_index import (
    EMPTY_FOLDER,
    FOLDER_OF_ITS_OWN,
    NOT_LISTED,
    IndexContent,
    write_index,
)
from evodsp.data.index.metadata import (
    ChainFacts,
    ClusterSizes,
    EntityClusters,
    are_entities,
    facts_of_file,
    read_chain_cache,
    read_entry_cache,
    read_sets,
    smallest_cluster,
    table_of,
)
from evodsp.data.index.parts import Parts, sources_of
from evodsp.data.records import CHAINS, COMPLEXES
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
from evodsp.data.sources.layout import StructureListing, nested_structure, split_key
from evodsp.errors import UserError
from evodsp.geometry.alphabet import decode
from evodsp.reading.quoting import one_line

_FORM = 3
"""The form in which a part describes what was scanned. Parts of another form, of an earlier version, are scanned again."""


@dataclass(frozen=True, slots=True)
class ScannedChain:
    """A chain of a row. `owner`: the key of the chain whose alignments it has; '' if there are none, or it is not known yet."""

    name: str
    sequence: str
    owner: str
    cluster: int
    database: str = ""
    """OpenFold's database with its alignments."""
    place: int = FOLDER_OF_ITS_OWN
    """Where its files are, if in no database: `EMPTY_FOLDER` and its like."""
    files: tuple[StoredFile, ...] = ()


@dataclass(frozen=True, slots=True)
class ScannedKey:
    """The findings of a scan about a key."""

    key: str
    facts: ChainFacts
    structure: str
    """Its structure file, relative to the folder; '' if there is none."""
    problem: str
    """The reason why its files could not be read, '' if they could."""
    chains: tuple[ScannedChain, ...]


def make_index(config: IndexConfig) -> int:
    """Scan and write the index of `config`, whose paths were checked, and show progress; returns the number of keys.

    Raises UserError if there are none, or a cache or a list is broken. A structure or alignment that cannot be read is no
    error: the index names it with the reason.
    """
    sources = sources_of(config)
    duplicates = [] if config.duplicates is None else read_sets(config.duplicates)
    clusters = _Clusters([] if config.cluster_file is None else read_sets(config.cluster_file))
    obsolete = {} if config.obsolete is None else parse_obsolete(config.obsolete)
    scan = _scan_complexes if config.complexes else _scan_chains
    parts, scanned = scan(config, sources, duplicates, clusters)
    content = assemble(scanned)
    if not config.complexes:
        content = with_lenders(content, duplicates)
    parts.before_writing()
    kind = COMPLEXES if config.complexes else CHAINS
    write_index(config.output, content, sources, obsolete, kind, config.assembly)
    parts.remove()
    return len(content.table)


class _Clusters:
    """The clusters of a list, of chains or of entities."""

    def __init__(self, clusters: list[list[str]]) -> None:
        self.are_entities = bool(clusters) and are_entities(clusters)
        """Whether the number of each chain's entity is to be read."""
        self._clusters = clusters

    def sizes(self, keys: Iterable[str], entities: Iterable[str]) -> Iterator[int]:
        """The size of each chain's cluster, given its key and its entity; UNKNOWN_CLUSTER where unknown."""
        if self.are_entities:
            return iter(EntityClusters(self._clusters).sizes(entities))
        return map(ClusterSizes(self._clusters).of, keys)


def assemble(scanned: Iterable[ScannedKey]) -> IndexContent:
    """The columns of an index. `scanned`: sorted by key."""
    keys, facts, structures, problems, first_chains = [], [], [], [], [0]
    names, sequences, owners, clusters, places, first_files = [], [], [], [], [], [0]
    databases: dict[str, int] = {}
    file_names: dict[str, int] = {}
    files: list[tuple[int, int, int]] = []
    for one in scanned:
        keys.append(one.key)
        facts.append(one.facts)
        structures.append(one.structure)
        problems.append(one.problem)
        for chain in one.chains:
            names.append(chain.name)
            sequences.append(chain.sequence)
            owners.append(chain.owner)
            clusters.append(chain.cluster)
            is_stored = bool(chain.database)
            places.append(databases.setdefault(chain.database, len(databases)) if is_stored else chain.place)
            files += [(file_names.setdefault(file.name, len(file_names)), *file[1:]) for file in chain.files]
            first_files.append(len(files))
        first_chains.append(len(names))
    name_rows, offsets, lengths = np.array(files, np.int64).reshape(-1, 3).T
    return IndexContent(
        table=table_of(PackedTexts.of(keys), facts),
        structures=PackedTexts.of(structures),
        problems=PackedTexts.of(problems),
        chain_names=PackedTexts.of(names),
        sequences=PackedTexts.of(sequences),
        owners=PackedTexts.of(owners),
        databases=PackedTexts.of(databases),
        file_names=PackedTexts.of(file_names),
        first_chains=np.array(first_chains, np.int64),
        chain_clusters=np.array(clusters, np.int64),
        chain_databases=np.array(places, np.int32),
        first_files=np.array(first_files, np.int64),
        file_name_rows=name_rows.astype(np.int32),
        file_offsets=np.ascontiguousarray(offsets),
        file_lengths=np.ascontiguousarray(lengths),
    )


def with_lenders(content: IndexContent, duplicates: Iterable[list[str]]) -> IndexContent:
    """The columns of an index of chains, in which a chain without alignments has those of an identical one. `duplicates`: sets
    of identical chains."""
    keys, representatives = content.table.keys[:], np.arange(len(content.table), dtype=np.int32)
    is_one = np.array([is_alignment(Path(name).name) for name in content.file_names], bool)
    before = np.concatenate([[0], np.cumsum(is_one[content.file_name_rows])])
    has_own = before[content.first_files[1:]] > before[content.first_files[:-1]]
    row_of = {key: row for row, key in enumerate(keys)}
    for same in duplicates:
        rows = [row_of[key] for key in same if key in row_of]
        lender = next((row for row in rows if has_own[row]), None)
        for row in rows:
            if lender is not None and not has_own[row]:
                representatives[row] = lender
    is_empty = content.chain_databases == EMPTY_FOLDER
    has_some = (has_own[representatives] | is_empty).tolist()
    owners = (keys[owner] if known else "" for owner, known in zip(representatives.tolist(), has_some, strict=True))
    table = replace(content.table, representatives=representatives)
    return replace(content, table=table, owners=PackedTexts.of(owners))


# Chains ----------------------------------------------------------------------------------------------------------------


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


def _scan_chains(
    config: IndexConfig, sources: list[Any], duplicates: list[list[str]], clusters: _Clusters
) -> tuple[Parts[ChainTask], Iterator[ScannedKey]]:
    """The chains of the index, which has them alone. Raises UserError if there are none."""
    listed = {} if config.chain_data_cache is None else read_chain_cache(config.chain_data_cache)
    facts = {} if config.mmcif_cache is None else read_entry_cache(config.mmcif_cache)
    facts |= {key: _filled(known, facts.get(key, ChainFacts())) for key, known in listed.items()}
    named = {*listed, *(key for same in duplicates for key in same)}  # mmcif_cache lists all entries of the PDB
    tasks = _tasks(config, facts, named, clusters.are_entities)
    parts = Parts(config, scan_chain, tasks, sources, _FORM)
    parts.scan("scanned chains")
    sizes = clusters.sizes((task.key for task in tasks), (found["entity"] for _, found in parts.scanned()))
    scanned = zip(parts.scanned(), sizes, strict=True)
    return parts, (_of_chain(task, found, facts, size) for (task, found), size in scanned)


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


def _of_chain(task: ChainTask, found: dict[str, Any], cached: Mapping[str, ChainFacts], cluster: int) -> ScannedKey:
    facts = cached.get(task.key) or ChainFacts(*found["facts"])
    if cluster != UNKNOWN_CLUSTER:
        facts = replace(facts, cluster_size=cluster)
    files = tuple(StoredFile(*file) for file in found["files"])
    place = EMPTY_FOLDER if found["empty"] else FOLDER_OF_ITS_OWN
    chain = ScannedChain(task.key, facts.sequence, "", facts.cluster_size, task.database, place, files)
    return ScannedKey(task.key, facts, found["structure"], found["problem"], (chain,))


# Complexes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComplexTask:
    """What is known about an entry before its structure is read."""

    entry: str
    structure: str
    """Its structure file, relative to the folder; '' if there is none."""
    assembly: str | None
    needs_entities: bool
    """Whether the number of each chain's entity is to be read, for clusters of entities."""


def _scan_complexes(
    config: IndexConfig, sources: list[Any], duplicates: list[list[str]], clusters: _Clusters
) -> tuple[Parts[ComplexTask], Iterator[ScannedKey]]:
    """The entries of the index, with the chains of their assemblies. Raises UserError if there are none."""
    aligned = _aligned(config.alignment_dir)
    lenders = _lenders(duplicates, aligned)
    listing = StructureListing(config.structure_dir)
    entries = sorted({split_key(key)[0] for key in (*aligned, *lenders)})
    if not entries:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another --alignment_dir")
    tasks = [
        ComplexTask(entry, listing.of_entry(entry) or "", config.assembly, clusters.are_entities) for entry in entries
    ]
    parts = Parts(config, scan_complex, tasks, sources, (_FORM, COMPLEXES))
    parts.scan("scanned complexes")
    found = [one for _, one in parts.scanned()]
    sizes = clusters.sizes(
        (key for one in found for key in one["keys"]), (entity for one in found for entity in one["entities"])
    )
    pairs = zip(tasks, found, strict=True)
    return parts, (_of_complex(task, one, aligned, lenders, [next(sizes) for _ in one["keys"]]) for task, one in pairs)


def _of_complex(
    task: ComplexTask,
    found: dict[str, Any],
    aligned: Collection[str],
    lenders: Mapping[str, str],
    clusters: Sequence[int],
) -> ScannedKey:
    keys, sequences = found["keys"], found["sequences"]
    owners = _owners(keys, sequences, aligned, lenders)
    without = dict.fromkeys(key for key, owner in zip(keys, owners, strict=True) if not owner)
    problem = found["problem"] or (f"no alignments of {', '.join(without)}" if without else "")
    facts = ChainFacts("".join(sequences), found["resolution"], found["release_day"], smallest_cluster(clusters))
    chains = tuple(
        ScannedChain(name, letters, owner, cluster, place=NOT_LISTED)
        for name, letters, owner, cluster in zip(found["names"], sequences, owners, clusters, strict=True)
    )
    return ScannedKey(task.entry, facts, task.structure, problem, chains)


def scan_complex(alignment_dir: Path, structure_dir: Path, task: ComplexTask) -> dict[str, Any]:
    """The entry of a complex in its part: its chains, or the reason why they could not be read. `_FORM` numbers this form."""
    unread = ChainFacts()
    found: dict[str, Any] = {
        "names": [], "keys": [], "sequences": [], "entities": [], "problem": "",
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


def _owners(keys: list[str], sequences: list[str], aligned: Collection[str], lenders: Mapping[str, str]) -> list[str]:
    """For each chain of a complex the key of the chain whose alignments it has, '' if there is none: the first of its sequence
    that has alignments, else one that is identical to a chain of its sequence."""
    owner_of: dict[str, str] = {}
    for has in ({key: key for key in keys if key in aligned}, lenders):
        for key, letters in zip(keys, sequences, strict=True):
            if key in has:
                owner_of.setdefault(letters, has[key])
    return [owner_of.get(letters, "") for letters in sequences]
