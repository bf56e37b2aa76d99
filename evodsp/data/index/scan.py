"""`evodsp data index`: scanning a data set for its index (`evodsp.data.index.data_index`).

The main process lists both folders and reads the caches. Processes list the files of each chain that has alignments, and
read what its key stands for. Of a chain that no cache knows they read the header of the structure, or the first alignment if
there is no structure. Of a complex they read the assembly as training does, with all atoms, because a chain without
coordinates is no chain of a complex.

Chains of the index are those that have alignments, or that a cache or the list of identical chains names. Complexes are the
entries that have alignments of a chain, or of one that is identical to one of its chains by the list.

The sorted tasks are cut into parts, which processes scan. Each finished part is a JSON file in a hidden folder beside the
output. A rerun with the same inputs takes the finished parts from there. The result depends on the inputs only, not on the
number of processes or on interruptions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from evodsp.data.config import FILES, FOLDERS, IndexConfig, check_index_config
from evodsp.data.formats import parse_obsolete
from evodsp.data.formats.mmcif import read_assembly, read_header
from evodsp.data.index.data_index import (
    EMPTY_FOLDER,
    FOLDER_OF_ITS_OWN,
    NO_OWNER,
    DataIndex,
    IndexContent,
    ListedFiles,
    Source,
    write_index,
)
from evodsp.data.index.metadata import (
    UNKNOWN_CLUSTER,
    UNKNOWN_DAY,
    ChainFacts,
    ClusterSizes,
    EntityClusters,
    PackedTexts,
    are_entities,
    facts_of_chains,
    facts_of_file,
    read_chain_cache,
    read_entry_cache,
    read_sets,
    smallest_cluster,
    table_of,
)
from evodsp.data.pool import WorkerEndedError, executor
from evodsp.data.records import CHAINS, COMPLEXES, Kind
from evodsp.data.sources.layout import (
    StoredFile,
    StructureListing,
    chain_folders,
    file_of_chain,
    files_of_chain,
    first_record,
    is_alignment,
    is_empty_folder,
    nested_structure,
    order_in_msa,
    parse_alignments,
    read_databases,
    read_parts,
    split_key,
)
from evodsp.data.sources.opening import owners_of
from evodsp.errors import UserError
from evodsp.files import lock, remove_partial, write_text
from evodsp.geometry.residues import decode
from evodsp.printing import counted, one_line, progress, tell

TASKS_OF_PART = 500
Task = TypeVar("Task")

Scan = Callable[[Path, Path, Any], dict[str, Any]]
"""Scans one task, given the folders of alignments and of structures; in a process of its own."""


def sources_of(config: IndexConfig) -> list[Source]:
    """The folders and files that the config names, in their present state."""
    return [Source.of(name, path) for name in (*FOLDERS, *FILES) if (path := getattr(config, name)) is not None]


class Parts(Generic[Task]):
    """The parts of a scan."""

    def __init__(
        self, config: IndexConfig, one: Scan, tasks: Sequence[Task], sources: list[Source], form: object
    ) -> None:
        """`one`: scans a task. `form`: changes when what it returns does; parts of another form are scanned again."""
        self._config, self._one = config, one
        self._chunks = [tasks[at : at + TASKS_OF_PART] for at in range(0, len(tasks), TASKS_OF_PART)]
        self._folder = config.output.with_name(f".{config.output.name}.parts")
        digest = hashlib.sha256(repr([form, *(vars(source) for source in sources)]).encode())
        for task in tasks:
            digest.update(repr(task).encode("utf-8", "surrogateescape"))
        keep_parts(self._folder, digest.hexdigest())

    def scanned(self) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Each task with what was found."""
        for number, chunk in enumerate(self._chunks):
            yield from zip(chunk, json.loads(_part(self._folder, number).read_bytes()), strict=True)

    def before_writing(self) -> None:
        """Remove what a scan left that was killed while it wrote the output."""
        remove_partial(self._config.output.parent, {self._config.output.name})

    def remove(self) -> None:
        """Delete the parts: the output is complete."""
        shutil.rmtree(self._folder)

    def scan(self, what: str) -> None:
        """Write the parts that are missing, and show progress. `what`: the words for it."""
        config, folder = self._config, self._folder
        missing = [number for number in range(len(self._chunks)) if not _part(folder, number).is_file()]
        total = sum(map(len, self._chunks))
        left = sum(len(self._chunks[number]) for number in missing)
        alignments, structures = config.alignment_dir, config.structure_dir
        if config.scheduler is not None:  # its workers may run in other folders
            alignments, structures, folder = alignments.absolute(), structures.absolute(), folder.absolute()
        pieces = [
            (self._one, alignments, structures, _part(folder, number), self._chunks[number]) for number in missing
        ]
        ended: WorkerEndedError | None = None
        with progress(what, total, total - left) as advance:
            for _, done in executor(config.scheduler, config.workers).map(scan_part, pieces):
                if isinstance(done, WorkerEndedError):
                    ended = done
                else:
                    advance(done)
        if ended is not None:
            raise UserError(f"{ended}: run the command again with fewer --workers") from ended


def keep_parts(folder: Path, fingerprint: str) -> None:
    """Make the folder of parts ready: parts of a scan of other inputs are deleted, those of this one are kept."""
    plan = folder / "plan"
    if not plan.is_file() or plan.read_bytes() != fingerprint.encode():
        shutil.rmtree(folder, ignore_errors=True)
        write_text(plan, fingerprint)


def scan_part(one: Scan, alignment_dir: Path, structure_dir: Path, path: Path, tasks: Sequence[Any]) -> int:
    """Scan some tasks, write the findings to `path` and return the number of tasks. Runs in a process of its own."""
    found = [one(alignment_dir, structure_dir, task) for task in tasks]
    write_text(path, json.dumps(found))
    return len(tasks)


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


_FORM = 4
"""The form in which a part describes what was scanned. Parts of another form, of an earlier version, are scanned again."""


@dataclass(frozen=True, slots=True)
class KeyTask:
    """A key to scan, before its files are read."""

    kind: Kind
    key: str
    structure: str
    """Structure file, relative to the folder; '' if there is none."""
    aligned: tuple[ListedFiles, ...]
    """The chains with alignments that it stands for: a chain itself, or those of an entry. Without a database their files are
    not known yet."""
    needs_entities: bool
    """Whether the number of each chain's entity is to be read, for clusters of entities."""
    assembly: str | None = None
    """Of a complex: the assembly that is read."""
    in_cache: bool = False
    """Whether a cache has facts about the chain."""
    may_be_nested: bool = False
    """Whether the folder of structures has a folder of this name, where the structure may lie."""


class ScannedChain(NamedTuple):
    """A chain of a key; what is unknown is ''. `entry`: the key itself if its structure has one chain: alignments of that chain
    may have its name."""

    name: str
    key: str
    sequence: str = ""
    entity: str = ""
    entry: str = ""


def make_index(config: IndexConfig) -> int:
    """Scan and write the index of `config`, whose paths were checked, and show progress; returns the number of keys.

    Raises UserError if there are none, or a cache or a list is broken. A structure or alignment that cannot be read is no
    error: the index names it with the reason.
    """
    kind = COMPLEXES if config.complexes else CHAINS
    sources = sources_of(config)
    duplicates = [] if config.duplicates is None else read_sets(config.duplicates)
    clusters = [] if config.cluster_file is None else read_sets(config.cluster_file)
    obsolete = {} if config.obsolete is None else parse_obsolete(config.obsolete)
    listed = {} if config.chain_data_cache is None else read_chain_cache(config.chain_data_cache)
    facts = {} if config.mmcif_cache is None else read_entry_cache(config.mmcif_cache)
    facts |= {key: _filled(known, facts.get(key, ChainFacts())) for key, known in listed.items()}
    aligned, needs_entities = _aligned(config.alignment_dir), bool(clusters) and are_entities(clusters)
    if config.complexes:
        tasks = _complexes(config, aligned, duplicates, needs_entities)
    else:
        named = {*listed, *(key for same in duplicates for key in same)}  # mmcif_cache lists all entries of the PDB
        tasks = _chains(config, aligned, named, facts, needs_entities)
    if not any(task.aligned for task in tasks):
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another --alignment_dir")
    parts = Parts(config, scan_key, tasks, sources, _FORM)
    parts.scan(f"scanned {kind}")
    content = assemble(parts.scanned, facts, clusters, duplicates)
    parts.before_writing()
    write_index(config.output, content, sources, obsolete, kind, config.assembly)
    parts.remove()
    return len(content.table)


def _filled(known: ChainFacts, other: ChainFacts) -> ChainFacts:
    """`known`, with the missing facts taken from `other`."""
    return ChainFacts(
        known.sequence or other.sequence,
        other.resolution if math.isnan(known.resolution) else known.resolution,
        other.release_day if known.release_day == UNKNOWN_DAY else known.release_day,
        other.cluster_size if known.cluster_size == UNKNOWN_CLUSTER else known.cluster_size,
    )


def _aligned(alignment_dir: Path) -> dict[str, ListedFiles]:
    """The chains with alignments, sorted by key; of those in folders the files are not listed yet."""
    stored = {key: database for database in read_databases(alignment_dir) for key in database.entries}
    if stored:
        return {key: ListedFiles(key, *stored[key].files(key), False) for key in sorted(stored)}
    return {key: ListedFiles(key, "", [], False) for key in chain_folders(alignment_dir)}


def _chains(
    config: IndexConfig,
    aligned: Mapping[str, ListedFiles],
    named: set[str],
    facts: Mapping[str, ChainFacts],
    needs_entities: bool,
) -> list[KeyTask]:
    """The chains of an index, sorted by key: those with alignments and `named`."""
    listing = StructureListing(config.structure_dir)
    tasks = []
    for key in sorted({*aligned, *named}):
        try:
            structure = listing.of_chain(key) or ""
            may_be_nested = not structure and key in listing.folders
        except UserError:  # the name is no chain key: it has no structure, and training reports it so
            structure, may_be_nested = "", False
        own = (aligned[key],) if key in aligned else ()
        tasks.append(
            KeyTask(CHAINS, key, structure, own, needs_entities, in_cache=key in facts, may_be_nested=may_be_nested)
        )
    return tasks


def _complexes(
    config: IndexConfig, aligned: Mapping[str, ListedFiles], duplicates: list[list[str]], needs_entities: bool
) -> list[KeyTask]:
    """The complexes of an index, sorted by key: entries with alignments of a chain, or of one that is identical to a chain."""
    lending = (same for same in duplicates if any(key in aligned for key in same))
    of_entry: dict[str, list[ListedFiles]] = {}
    for key in (*aligned, *(key for same in lending for key in same)):
        if key.strip("_") == key:  # others are no keys
            of_entry.setdefault(split_key(key)[0], []).extend(filter(None, [aligned.get(key)]))
    listing = StructureListing(config.structure_dir)
    tasks = []
    for entry, own in sorted(of_entry.items()):
        structure = listing.of_entry(entry) or ""
        nested = not structure and entry in listing.folders
        tasks.append(
            KeyTask(COMPLEXES, entry, structure, tuple(own), needs_entities, config.assembly, may_be_nested=nested)
        )
    return tasks


def scan_key(alignment_dir: Path, structure_dir: Path, task: KeyTask) -> dict[str, Any]:
    """The entry of a key in its part: the files of its chains with alignments, its chains and the facts about them, or the
    reason why they could not be read. `_FORM` numbers this form."""
    found: dict[str, Any] = {
        "aligned": [],
        "structure": task.structure,
        "chains": [ScannedChain(task.key, task.key)] if task.kind == CHAINS else [],
        "facts": dataclasses.astuple(ChainFacts()),
        "problem": "",
    }
    try:
        listed = [_with_files(alignment_dir, one) for one in task.aligned]
        found["aligned"] = [one for one in listed if one.is_empty or _alignments(one)]
        if task.may_be_nested and (path := nested_structure(structure_dir, task.key)) is not None:
            found["structure"] = str(path.relative_to(structure_dir))
        if task.kind == CHAINS:
            _read_chain(alignment_dir, structure_dir, task, found)
        elif found["structure"]:
            _read_complex(structure_dir / found["structure"], task, found)
    except (UserError, OSError) as error:
        found["problem"] = one_line(str(error))
    return found


def _with_files(alignment_dir: Path, one: ListedFiles) -> ListedFiles:
    if one.database:
        return one
    files = [StoredFile(name, 0, length) for name, length in files_of_chain(alignment_dir / one.owner).items()]
    return one._replace(files=files, is_empty=not files and is_empty_folder(alignment_dir / one.owner))


def _alignments(one: ListedFiles) -> list[StoredFile]:
    """Its alignments for the MSA."""
    return [file for file in one.files if is_alignment(Path(file.name).name)]


def _read_chain(alignment_dir: Path, structure_dir: Path, task: KeyTask, found: dict[str, Any]) -> None:
    """Add the facts that the chain's header says, or its first alignment, if no cache has them."""
    facts, entity = ChainFacts(), ""
    if found["structure"] and (task.needs_entities or not task.in_cache):
        facts, entity = facts_of_file(structure_dir / found["structure"], task.key)
    elif not task.in_cache and found["aligned"]:
        facts = ChainFacts(sequence=_first_row(alignment_dir, *found["aligned"]))
    if task.in_cache:
        facts = ChainFacts()
    found["chains"] = [ScannedChain(task.key, task.key, facts.sequence, entity)]
    found["facts"] = dataclasses.astuple(facts)


def _first_row(alignment_dir: Path, one: ListedFiles) -> str:
    """The first row of a chain's first alignment; '' if it has none."""
    first = min(_alignments(one), key=lambda file: order_in_msa(Path(file.name).name), default=None)
    if first is None:
        return ""
    if one.database:
        ((source, _, data),) = read_parts(alignment_dir / one.database, one.owner, [first], one.database)
    else:
        source = str(file_of_chain(alignment_dir / one.owner, first.name))
        data = first_record(Path(source))
    alignments = parse_alignments([(source, data)])
    return decode(alignments[0].residues[0]) if alignments else ""


def _read_complex(path: Path, task: KeyTask, found: dict[str, Any]) -> None:
    """Add the chains of the assembly, and what the file says about it."""
    chains = (assembly := read_assembly(path, task.assembly)).chains
    header = read_header(path) if task.needs_entities or task.key in (one.owner for one in task.aligned) else None
    entities = {} if header is None else {name: f"{task.key}_{number}" for name, number in header.entities.items()}
    entry = task.key if header is not None and len(header.sequences) == 1 else ""
    found["chains"] = [
        ScannedChain(name, f"{task.key}_{one.chain_id}", one.sequence, entities.get(one.chain_id, ""), entry)
        for name, one in zip(assembly.names, chains, strict=True)
    ]
    found["facts"] = dataclasses.astuple(facts_of_chains(chains))


Scanned = Callable[[], Iterable[tuple[KeyTask, dict[str, Any]]]]
"""The findings of a scan from the first to the last key, each time that it is called."""


def assemble(
    scanned: Scanned, cached: Mapping[str, ChainFacts], clusters: list[list[str]], duplicates: list[list[str]]
) -> IndexContent:
    """The columns of an index. `cached`: facts about chains that go before those that were found, but for sequences.
    `clusters`: of chains or of entities. `duplicates`: sets of identical chains."""
    databases: dict[str, int] = {}
    file_names: dict[str, int] = {}
    places: dict[str, int] = {}
    files: dict[str, list[tuple[int, int, int]]] = {}
    for _, found in scanned():
        for key, database, listed, is_empty in found["aligned"]:
            place = EMPTY_FOLDER if is_empty else FOLDER_OF_ITS_OWN
            places[key] = databases.setdefault(database, len(databases)) if database else place
            files[key] = [(file_names.setdefault(name, len(file_names)), *where) for name, *where in listed]
    owner_of = _lent(places, duplicates)
    owners = [key for key in sorted(places) if owner_of[key] == key]
    row_of_owner = {key: row for row, key in enumerate(owners)} | {"": NO_OWNER}
    all_chains = (ScannedChain(*chain) for _, found in scanned() for chain in found["chains"])
    if are_entities(clusters):
        sizes = iter(EntityClusters(clusters).sizes(chain.entity for chain in all_chains))
    else:
        sizes = map(ClusterSizes(clusters).of, (chain.key for chain in all_chains))
    keys, facts, structures, problems, first_chains = [], [], [], [], [0]
    names, sequences, chain_clusters, chain_owners = [], [], [], []
    for task, found in scanned():
        chains = [ScannedChain(*chain) for chain in found["chains"]]
        known = [cached.get(chain.key, ChainFacts()) for chain in chains]
        letters = [chain.sequence or fact.sequence for chain, fact in zip(chains, known, strict=True)]
        of_clusters = [
            fact.cluster_size if size == UNKNOWN_CLUSTER else size
            for size, fact in zip(islice(sizes, len(chains)), known, strict=True)
        ]
        for chain in chains:
            owner_of.setdefault(chain.key, owner_of.get(chain.entry, ""))
        taken = owners_of([chain.key for chain in chains], letters, owner_of.__getitem__)
        without = dict.fromkeys(chain.key for chain, owner in zip(chains, taken, strict=True) if not owner)
        is_lacking = bool(without) and task.kind == COMPLEXES
        entry = _filled(known[0] if known else ChainFacts(), ChainFacts(*found["facts"]))
        keys.append(task.key)
        facts.append(replace(entry, sequence="".join(letters), cluster_size=smallest_cluster(of_clusters)))
        structures.append(found["structure"])
        problems.append(found["problem"] or (f"no alignments of {', '.join(without)}" if is_lacking else ""))
        names += [chain.name for chain in chains]
        sequences += letters
        chain_clusters += of_clusters
        chain_owners += [row_of_owner[owner] for owner in taken]
        first_chains.append(len(names))
    row_of = {key: row for row, key in enumerate(keys)}
    representatives = [row_of.get(owner_of.get(key, key), row) for row, key in enumerate(keys)]
    of_owners = [file for key in owners for file in files[key]]
    name_rows, offsets, lengths = np.array(of_owners, np.int64).reshape(-1, 3).T
    return IndexContent(
        table=replace(table_of(PackedTexts.of(keys), facts), representatives=np.array(representatives, np.int32)),
        structures=PackedTexts.of(structures),
        problems=PackedTexts.of(problems),
        chain_names=PackedTexts.of(names),
        sequences=PackedTexts.of(sequences),
        owners=PackedTexts.of(owners),
        databases=PackedTexts.of(databases),
        file_names=PackedTexts.of(file_names),
        first_chains=np.array(first_chains, np.int64),
        chain_clusters=np.array(chain_clusters, np.int64),
        chain_owners=np.array(chain_owners, np.int32),
        owner_databases=np.array([places[key] for key in owners], np.int32),
        first_files=np.cumsum([0, *(len(files[key]) for key in owners)]),
        file_name_rows=name_rows.astype(np.int32),
        file_offsets=np.ascontiguousarray(offsets),
        file_lengths=np.ascontiguousarray(lengths),
    )


def _lent(places: Mapping[str, int], duplicates: list[list[str]]) -> dict[str, str]:
    """The chain whose alignments each chain has: itself, or an identical one if it has none. A chain to which nobody lends has
    its own folder, which is empty. Chains that have neither are absent. `places`: entries of `owner_databases`."""
    owner_of = {key: key for key in places}
    for same in duplicates:
        lender = next((key for key in same if places.get(key, EMPTY_FOLDER) != EMPTY_FOLDER), None)
        if lender is not None:
            owner_of |= {key: lender for key in same if places.get(key, EMPTY_FOLDER) == EMPTY_FOLDER}
    return owner_of


def run(settings: IndexConfig, words: list[str]) -> int:
    """Write the index, report what it lists, and return the exit code. `words`: the command line (not needed here)."""
    check_index_config(settings)
    output = settings.output
    with lock(output.with_name(f".{output.name}.lock"), output, "makes an index there"):
        make_index(settings)
    tell(summary(DataIndex(output, kind=None)))
    return 0


def summary(index: DataIndex) -> str:
    """A line with the number of keys that can be used, and what the others lack; of complexes also the numbers of their chains
    and residues, and the reason of the first problem."""
    content, of_complexes = index.content, index.kind == COMPLEXES
    aligned, resolved = index.has_alignments(), index.has_structure()
    keys, owners = index.keys[:], [*content.owners[:], ""]  # the last stands for NO_OWNER
    of_chain = np.repeat(np.arange(len(index)), np.diff(content.first_chains)).tolist()
    owned = ((row, owners[owner]) for row, owner in zip(of_chain, content.chain_owners.tolist(), strict=True))
    borrowed = {row for row, owner in owned if owner and keys[row] not in (owner, owner.rpartition("_")[0])}
    counts = {
        "without alignments": int((~aligned).sum()),
        "without a structure": int((~resolved).sum()),
        "with alignments of an identical chain": len(borrowed),
        "with an empty folder of alignments": int(index.are_query_only().sum()),
        "of one chain only": int((np.diff(content.first_chains) == 1).sum()) if of_complexes else 0,
        "with a problem" if of_complexes else "that cannot be read": int((content.problems.lengths() > 0).sum()),
    }
    rows = f"{len(index):,} {index.kind}, {int((aligned & resolved).sum()):,} with alignments and structure"
    line = ", ".join([f"{index.path}: {rows}", *(f"{count:,} {what}" for what, count in counts.items() if count)])
    if not of_complexes:
        return line
    problem = next((text for text in content.problems if text), None)
    more = "" if problem is None else f", such as {problem}"
    residues = int(index.table.lengths.sum())
    return f"{line}{more}; {counted(len(content.chain_names), 'chain')}, {residues:,} residues"
