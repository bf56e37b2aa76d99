"""`evodsp data build`: chains are parsed once, in parallel, into a feature store.

A store is complete when it has its `store.json`, which is written last. Until then `building/` holds the plan and the
account of each finished shard, so a build that was killed goes on where it stopped, and the result is the same, byte by
byte.

A worker makes one shard of a store, and the account of it. The account (`building/<table>_<number>.json`) is written after
the shard, so a shard with an account is complete. A chain that cannot be read is named in it with the reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evodsp.data.complexes.pairing import RuleName
from evodsp.data.config import BuildConfig
from evodsp.data.formats import parse_obsolete
from evodsp.data.index.metadata import day_of
from evodsp.data.pool import Executor, LocalProcesses, WorkerEndedError, executor
from evodsp.data.records import CHAINS, COMPLEXES, ONE_OF, Kind
from evodsp.data.samples.selection import chain_list
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import (
    DESCRIPTION,
    FORMAT_VERSION,
    INDEX,
    LONGEST_KEY,
    TEMPLATES,
    ShardEntry,
    digest_of,
    encode_chain,
    encode_record,
    shard_name,
    write_index,
    write_shard,
)
from evodsp.data.sources.opening import ComplexFiles, Unit, open_files
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import FileFormatError, UserError
from evodsp.files import check_output_folder, holder, lock, waited_lock, write_text
from evodsp.printing import counted, one_line, progress, tell
from evodsp.version import __version__

BUILDING = "building"
"""Sub-folder of an unfinished store, which holds the plan and the accounts."""

_Record = tuple[str, bytes, int, int]


@dataclass(frozen=True)
class BuildInputs:
    """The folders and files that a store is made of; all paths are absolute, for workers in other folders."""

    alignment_dir: str
    structure_dir: str
    template_structure_dir: str | None
    obsolete: str | None
    min_plddt: float | None = None
    pairing: RuleName | None = None
    """The rule by which rows of complexes are paired; None: the store is of single chains."""
    assembly: str | None = None
    """The biological assembly of complexes; None: the asymmetric unit."""

    @property
    def kind(self) -> Kind:
        """Kind of the records."""
        return CHAINS if self.pairing is None else COMPLEXES


@dataclass(frozen=True)
class Part:
    """A shard to make. `names`: the keys of its chains or complexes, or the entries of its template structures."""

    store: Path
    table: str
    number: int
    names: tuple[str, ...]
    inputs: BuildInputs

    @property
    def shard(self) -> Path:
        return self.store / self.table / shard_name(self.number)

    @property
    def account(self) -> Path:
        return self.store / BUILDING / f"{self.table}_{self.number:05}.json"

    @property
    def current(self) -> Path:
        """The file that holds the name which a worker is reading."""
        return self.account.with_suffix(".current")


@dataclass(frozen=True)
class Account:
    """The outcome of a part. `failed`: the names that could not be read, with reasons. `entries`: the entries that template
    hits of its records name."""

    records: list[ShardEntry]
    failed: list[tuple[str, str]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Account:
        """The account in a file. Raises FileFormatError for a file that is no account."""
        try:
            content = json.loads(path.read_text())
            records = [ShardEntry(**entry) for entry in content["records"]]
            return cls(records, [(name, reason) for name, reason in content["failed"]], content["entries"])
        except (ValueError, TypeError, KeyError) as error:
            raise FileFormatError(path, "not the account of a shard; remove it, and its shard is made again") from error


def build_part(part: Part, deadly: Mapping[str, str] = MappingProxyType({})) -> int:
    """Make the shard and its account. Returns the number of its names.

    `deadly`: the names to leave out because reading them ended a worker before, with reasons. Raises OSError if the shard
    cannot be written.
    """
    failed: dict[str, str] = {}
    entries: set[str] = set()
    read = _read_templates if part.table == TEMPLATES else _read_record

    def records() -> Iterator[_Record]:
        for name in part.names:
            part.current.write_bytes(name.encode("utf-8", "surrogateescape"))  # a folder's name may be any bytes
            if name in deadly:
                failed[name] = deadly[name]
                continue
            try:
                yield from read(name, part.inputs, entries)
            except (UserError, ValueError, MemoryError) as error:
                failed[name] = one_line(str(error)) or "not enough memory"

    written = write_shard(part.shard, records())
    account = Account(written, list(failed.items()), sorted(entries))
    write_text(part.account, json.dumps(asdict(account)))
    part.current.unlink(missing_ok=True)
    return len(part.names)


def _read_record(key: str, inputs: BuildInputs, entries: set[str]) -> list[_Record]:
    _check_key(key)
    parsed = opened(inputs).parsed(key, with_hits=inputs.template_structure_dir is not None)
    entries |= _entries_of([hit for hits in parsed.hits.values() for hit in hits], inputs)
    released = day_of(parsed.assembly.chains[0].release_date)
    return [(key, encode_record(parsed), len(parsed.assembly), released)]


def _read_templates(pdb_id: str, inputs: BuildInputs, _: set[str]) -> list[_Record]:
    assert inputs.template_structure_dir is not None
    folder = _structures(inputs.template_structure_dir)
    released = day_of(folder.release_date(pdb_id))
    chains = folder.structure(pdb_id).chains.values()
    records = [(f"{pdb_id}_{chain.chain_id}", encode_chain(chain), len(chain), released) for chain in chains]
    for key, *_rest in records:
        _check_key(key)
    return records


def _entries_of(hits: Collection[TemplateHit], inputs: BuildInputs) -> set[str]:
    """The entries with a structure that stand for those of `hits`: these entries themselves, or their successors
    (`select_hits`)."""
    if not hits:
        return set()
    assert inputs.template_structure_dir is not None
    folder, obsolete = _structures(inputs.template_structure_dir), obsolete_entries(inputs.obsolete)
    found = {
        pdb_id if _has(folder, pdb_id) else obsolete.get(pdb_id, pdb_id) for pdb_id in {hit.pdb_id for hit in hits}
    }
    return {pdb_id for pdb_id in found if pdb_id is not None and _has(folder, pdb_id)}


def _has(folder: StructureFolder, pdb_id: str) -> bool:
    return folder.has_structure(f"{pdb_id}_A")


def _check_key(key: str) -> None:
    if len(key.encode()) > LONGEST_KEY or "/" in key or "\0" in key:
        raise UserError(f"'{key[:LONGEST_KEY]}' cannot be stored: a key has at most {LONGEST_KEY} bytes, and no slash")


# A worker process builds many parts, so the folders that it opened stay open.


@lru_cache(maxsize=1)
def opened(inputs: BuildInputs) -> ChainFiles | ComplexFiles:
    """The files that the records of a store are made of."""
    unit = Unit() if inputs.pairing is None else Unit(COMPLEXES, inputs.assembly, inputs.pairing)
    return open_files(inputs.alignment_dir, inputs.structure_dir, unit=unit, min_plddt=inputs.min_plddt)


@lru_cache(maxsize=1)
def _structures(directory: str) -> StructureFolder:
    return StructureFolder(directory)


@lru_cache(maxsize=1)
def obsolete_entries(path: str | None) -> dict[str, str | None]:
    """The withdrawn entries of obsolete.dat with their successors; none without a file."""
    return {} if path is None else parse_obsolete(path)


FAILED = "failed.jsonl"
LOCK = "build.lock"
"""Name of the lock that a task holds while it reads all accounts or completes the store."""
_ENTRIES_PER_SHARD = 512
"""Entries of template structures in one shard. They are smaller than chains with alignments."""
_MOST_SHOWN = 5
_KILLED = "its worker process was ended (out of memory, or a crash of a parser)"


@dataclass(frozen=True)
class BuildPlan:
    """The chains and folders that a store is made of. Two builds with the same plan make the same store."""

    keys: tuple[str, ...]
    inputs: BuildInputs
    chains_per_shard: int

    @classmethod
    def of(cls, config: BuildConfig) -> BuildPlan:
        """The plan of a command. Raises UserError for folders, files and names that do not exist."""
        templates, obsolete = config.template_structure_dir, config.obsolete
        inputs = BuildInputs(
            str(config.alignment_dir.absolute()),
            str(config.structure_dir.absolute()),
            None if templates is None else str(templates.absolute()),
            None if obsolete is None else str(obsolete.absolute()),
            config.min_plddt,
            pairing=config.pairing if config.complexes else None,
            assembly=config.assembly if config.complexes else None,
        )
        store = opened(inputs)
        if templates is not None:
            StructureFolder(templates)
        obsolete_entries(inputs.obsolete)
        keys = chain_list(str(config.chains)) if config.chains is not None else store.keys()
        if not keys:
            raise UserError(
                f"{config.alignment_dir}: no {inputs.kind} with alignments in it; give another --alignment_dir"
            )
        return cls(tuple(sorted(keys)), inputs, config.chains_per_shard)

    def description(self) -> dict[str, Any]:
        """The short form in which a store keeps the plan, to recognise it."""
        digest = digest_of("\n".join(self.keys).encode())
        return {"chains": len(self.keys), "chains_digest": digest, "chains_per_shard": self.chains_per_shard,
            **asdict(self.inputs)}  # fmt: skip

    def parts(self, store: Path, table: str, names: Iterable[str]) -> list[Part]:
        """The shards of a table, in the order of their numbers."""
        names = tuple(names)
        size = _ENTRIES_PER_SHARD if table == TEMPLATES else self.chains_per_shard
        pieces = [names[first : first + size] for first in range(0, len(names), size)]
        return [Part(store.absolute(), table, number, piece, self.inputs) for number, piece in enumerate(pieces)]


def run(config: BuildConfig, words: list[str]) -> int:
    """Build the store and return the exit code. `words`: the command line (not needed here)."""
    build(config)
    return 0


def build(config: BuildConfig) -> None:
    """Build the store of `config`, or the missing parts of it. Failed chains are listed in `failed.jsonl` and left out.

    Raises UserError if all chains fail, if the output holds another store, or if it cannot be written.
    """
    check_output_folder(config.output)
    plan, folder = BuildPlan.of(config), config.output
    if (folder / DESCRIPTION).is_file():
        _check_same(plan, folder / DESCRIPTION, "holds a store")
        tell(f"{folder}: is complete already")
        return
    path = folder / BUILDING / "plan.json"
    _check_begun(plan, path)
    with _share_lock(config):
        _begin(plan, path)
        _build_parts(config, plan)


def _build_parts(config: BuildConfig, plan: BuildPlan) -> None:
    """Build this task's share, and complete the store if it was the last one."""
    folder = config.output
    records = plan.parts(folder, plan.inputs.kind, plan.keys)
    if not _built(config, plan.inputs.kind, records):
        return
    with waited_lock(folder / LOCK):
        if _is_ended(folder):
            return
        accounts = [Account.read(part.account) for part in records]
    entries = sorted({entry for account in accounts for entry in account.entries})
    templates = plan.parts(folder, TEMPLATES, entries)
    if not _built(config, "template structures", templates):
        return
    with waited_lock(folder / LOCK):
        if not _is_ended(folder):
            _complete(plan, folder, accounts, [Account.read(part.account) for part in templates])


def _is_ended(folder: Path) -> bool:
    """Whether another task, ready at the same moment, has completed the store, or given it up because all chains failed."""
    return (folder / DESCRIPTION).is_file() or not (folder / BUILDING).is_dir()


@contextmanager
def _share_lock(config: BuildConfig) -> Iterator[None]:
    """Keep away tasks with the same share of the output, and tasks that divide the work among another number.

    Raises UserError if such a task is running.
    """
    folder, (task, tasks) = config.output, config.share_of_tasks
    with lock(folder / BUILDING / _lock_name(task, tasks), folder, "builds a store there"):
        for path in (folder / BUILDING).glob(_lock_name("*", "*")):
            if not path.match(_lock_name("*", tasks)) and (other := holder(path)) is not None:
                share = path.stem.replace("-of-", "/")
                raise UserError(f"--output {folder}: {other} builds share {share} there; wait until it has ended")
        yield


def _lock_name(task: int | str, tasks: int | str) -> str:
    return f"{task}-of-{tasks}.lock"


def _check_begun(plan: BuildPlan, path: Path) -> None:
    """Raise UserError if the folder was begun with another plan than in the file `path`, or holds something else."""
    folder = path.parents[1]
    if path.is_file():
        _check_same(plan, path, "was begun")
    elif folder.exists() and any(item.name not in (BUILDING, FAILED, LOCK) for item in folder.iterdir()):
        raise UserError(f"--output {folder}: is not an empty folder, nor a store that was begun; name a new one")


def _begin(plan: BuildPlan, path: Path) -> None:
    """Write the plan first: without it, a task that starts at the same moment would find a stranger's folders."""
    write_text(path, json.dumps({"format_version": FORMAT_VERSION, "plan": plan.description()}))
    for name in (plan.inputs.kind, TEMPLATES):
        (path.parents[1] / name).mkdir(exist_ok=True)


def _check_same(plan: BuildPlan, path: Path, what: str) -> None:
    try:
        content = json.loads(path.read_text())
        version, found = content["format_version"], content["plan"]
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(path, "not the plan of a feature store; remove its folder and build it again") from error
    wanted = plan.description()
    differs = [name for name in wanted if found.get(name) != wanted[name]]
    if version != FORMAT_VERSION or differs:
        name = differs[0] if differs else "format_version"
        values = f"{found.get(name)}, not {wanted[name]}" if differs else f"{version}, not {FORMAT_VERSION}"
        raise UserError(
            f"--output {path.parent if path.name == DESCRIPTION else path.parents[1]}: {what} with {name} {values}; give the "
            "same settings, or another --output"
        )


def _built(config: BuildConfig, what: str, parts: list[Part]) -> bool:
    """Build the missing parts in this task's share. Returns whether all `parts` exist afterwards."""
    missing = [part for part in parts if not part.account.is_file()]
    task, tasks = config.share_of_tasks
    mine = [part for part in missing if part.number % tasks == task]
    names, left = (sum(len(part.names) for part in some) for some in (parts, mine))
    if mine:
        with progress(what, names, names - left) as advance:
            for more in build_parts(mine, executor(config.scheduler, config.workers, isolated=True)):
                advance(more)
    unbuilt = sum(not part.account.is_file() for part in parts)
    if unbuilt:
        tell(
            f"{what}: {unbuilt} of {len(parts)} shards are left to other tasks; when they are done, run the command again "
            "without --share"
        )
    return not unbuilt


def build_parts(
    parts: Sequence[Part], builders: Executor, build: Callable[[Part, dict[str, str]], int] = build_part
) -> Iterator[int]:
    """Build the parts. Yields the number of names of each finished part. `build`: the function that builds a part and returns
    that number.

    If reading a chain ends the process, the part is made again without that chain. On a cluster nobody knows which chain that
    was, or whether a chain was the cause, so such a part is made on this machine. Raises OSError if a part cannot be written.
    """
    left: list[tuple[Part, dict[str, str]]] = [(part, {}) for part in parts]
    while left:
        for part, _ in left:
            part.current.unlink(missing_ok=True)  # left by a build that was killed
        ended = []
        for number, made in builders.map(build, left):
            if isinstance(made, WorkerEndedError):
                ended.append(left[number])
            else:
                yield made
        if isinstance(builders, LocalProcesses):
            ended = [(part, deadly | _killed_by(part, deadly)) for part, deadly in ended]
        else:
            builders = LocalProcesses(1, isolated=True)
        left = ended


def _killed_by(part: Part, deadly: dict[str, str]) -> dict[str, str]:
    """The name that a dead worker was reading, with the reason why it is left out from now on."""
    name = part.current.read_bytes().decode("utf-8", "surrogateescape") if part.current.is_file() else ""
    if not name or name in deadly:
        raise UserError(
            f"{part.shard}: the worker process that makes it was ended (out of memory?); use fewer --workers and run again"
        )
    return {name: _KILLED}


def _complete(plan: BuildPlan, folder: Path, records: list[Account], templates: list[Account]) -> None:
    """Write the list of failures, the indices, and last the description."""
    kind = plan.inputs.kind
    for name in (kind, TEMPLATES):
        for partial in (folder / name).glob(".*.partial"):  # left by workers that were killed
            partial.unlink()
    failed = [
        {"kind": what, "name": name, "reason": reason}
        for what, accounts in ((ONE_OF[kind], records), ("template", templates))
        for account in accounts
        for name, reason in account.failed
    ]
    write_text(folder / FAILED, "".join(f"{json.dumps(entry)}\n" for entry in failed))
    bad = [entry for entry in failed if entry["kind"] == ONE_OF[kind]]
    if len(bad) == len(plan.keys):
        for name in (BUILDING, kind, TEMPLATES):  # the next build tries them again
            shutil.rmtree(folder / name)
        raise UserError(
            f"{folder / FAILED}: all {counted(len(bad), ONE_OF[kind])} failed, the first with: {bad[0]['reason']}"
        )
    tables = {str(kind): write_index(folder / kind / INDEX, [account.records for account in records])}
    if plan.inputs.template_structure_dir is not None:
        tables[TEMPLATES] = write_index(folder / TEMPLATES / INDEX, [account.records for account in templates])
    else:
        (folder / TEMPLATES).rmdir()
    description = {
        "format_version": FORMAT_VERSION,
        "evodsp": __version__,
        "plan": plan.description(),
        "tables": tables,
        "obsolete": obsolete_entries(plan.inputs.obsolete),
    }
    write_text(folder / DESCRIPTION, json.dumps(description))
    shutil.rmtree(folder / BUILDING)
    _report(folder, kind, sum(len(account.records) for account in records), failed)


def _report(folder: Path, kind: Kind, count: int, failed: list[dict[str, str]]) -> None:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    tell(f"{folder}: {counted(count, ONE_OF[kind])}, {size / 1e6:,.1f} MB")
    for entry in failed[:_MOST_SHOWN]:
        tell(f"left out: {entry['kind']} {entry['name']}: {entry['reason']}")
    if failed:
        bad = sum(entry["kind"] == ONE_OF[kind] for entry in failed)
        tell(
            f"warning: {counted(bad, ONE_OF[kind])} and {counted(len(failed) - bad, 'template structure')} were left out; "
            f"{folder / FAILED} lists them with reasons"
        )
