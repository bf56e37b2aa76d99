"""A scan in parallel and in parts that survive a kill.

The sorted tasks are cut into parts, which processes scan. Each finished part is a JSON file in a hidden folder beside the
output. A rerun with the same inputs takes the finished parts from there. The result depends on the inputs only, not on the
number of processes or on interruptions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from evodsp.data.executors import executor
from evodsp.data.index.config import FILES, FOLDERS, IndexConfig
from evodsp.data.index.data_index import Source
from evodsp.data.pool import WorkerEndedError
from evodsp.errors import UserError
from evodsp.files import remove_partial, write_text
from evodsp.printing import progress

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
