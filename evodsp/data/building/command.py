"""`evodsp data build`: plan the shards, have them built, and join their accounts into a store.

A store is complete when it has its `store.json`, which is written last. Until then `building/` holds the plan and the account
of each finished shard, so a build that was killed goes on where it stopped, and the result is the same, byte by byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evodsp.data.building.config import BuildConfig
from evodsp.data.building.parts import BUILDING, Account, BuildInputs, Part, build_part, obsolete_entries, opened
from evodsp.data.executors import Executor, LocalProcesses, executor
from evodsp.data.pool import WorkerEndedError
from evodsp.data.records import ONE_OF, Kind
from evodsp.data.samples.selection import chain_list
from evodsp.data.sources.feature_store import DESCRIPTION, FORMAT_VERSION, TEMPLATES
from evodsp.data.sources.shards import INDEX, digest_of, write_index
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import FileFormatError, UserError
from evodsp.files import check_output_folder, holder, lock, waited_lock, write_text
from evodsp.printing import counted, progress, tell
from evodsp.version import __version__

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
