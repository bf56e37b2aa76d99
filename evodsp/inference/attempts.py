"""Notes of attempts: which records are being computed, so that a record that kills a rank is not tried for ever.

A rank that is killed, mostly for want of memory, says nothing, and leaves the others in a collective from which nothing gets
them out: the run ends. So a file `.<name>.begun` in the output folder says that a record is being computed. It is removed when
the record is done or has failed, and by Ctrl-C. The next start computes the record once more, because a job may end for other
reasons; if that start ends there too, later ones leave the record out and say how to try it again. A rank that finds by itself
that it has no memory left notes the reason, and the next start leaves the record out at once. A start with other options that
decide about memory tries it anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.inference.devices import LESS_MEMORY
from evodsp.inference.failures import RecordFailure
from evodsp.launch.consensus import from_first
from evodsp.parallel.group import Group
from evodsp.printing import one_line, tell

_STARTS = 2
"""A record that ended this many starts is left out."""


@dataclass(frozen=True)
class AttemptNotes:
    """The notes in an output folder."""

    output: Path
    options: Mapping[str, str]
    """The options that decide about memory (`PredictConfig.memory_options`)."""

    @contextmanager
    def noted(self, name: str, group: Group | None) -> Iterator[RecordFailure | None]:
        """Within this context a note says that the record is being computed. Yields a failure if the record is left out
        instead.

        All ranks of the `group` that computes it call this; the first one writes. Raises UserError if that is impossible.
        """
        made = [folder for folder in (self.output, *self.output.parents) if not folder.exists()]
        left_out = from_first(partial(self._begin, name), group)
        try:
            yield left_out
        except (KeyboardInterrupt, UserError):
            self._forget(name, made, group)
            raise
        if left_out is None:
            self._forget(name, made, group)

    def note_progress(self, name: str) -> None:
        """Note that a part of this record is finished: the starts before this one do not count against it any more."""
        self._write(name, 1)

    def give_up(self, failure: RecordFailure, again: str) -> NoReturn:
        """Note why the next start is to leave a record out, say so, and end this process: the others cannot go on with it.

        `again`: the words of the message for the command that the user has to repeat.
        """
        with suppress(UserError):  # this rank may be on a machine without the output folder
            self._write(failure.name, _STARTS, failure.reason)
        tell(
            f"evodsp: error: {one_line(failure.reason)}. The other ranks wait for this one, so the run ends; {again} leaves "
            "this record out and keeps what is finished"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _begin(self, name: str) -> RecordFailure | None:
        path = self._path(name)
        starts, reason = self._read(name)
        if starts < _STARTS:
            self._write(name, starts + 1)
            return None
        ended = f"left out, because {starts} runs ended while they computed it, probably for want of memory"
        why = f"{name}: {ended}; {LESS_MEMORY}"
        return RecordFailure(name, f"{reason or why}; or delete {path} to try it again")

    def _forget(self, name: str, made: list[Path], group: Group | None) -> None:
        """Remove the note, and each of the folders `made` for it that holds nothing else."""
        if group is not None and group.rank > 0:
            return
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()

    def _path(self, name: str) -> Path:
        """The file of a note. It is no record's own folder, because their names do not begin with a dot."""
        return self.output / f".{name}.begun"

    def _read(self, name: str) -> tuple[int, str | None]:
        """How many starts with these options ended in the record, and the reason, if it is known."""
        try:
            note: Any = json.loads(self._path(name).read_text(encoding="utf-8"))
            if note["options"] != self.options:
                return 0, None
            reason = note["reason"]
            return int(note["starts"]), None if reason is None else one_line(str(reason))
        except OSError:
            return 0, None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a full disk, or somebody's own file
            return 1, None

    def _write(self, name: str, starts: int, reason: str | None = None) -> None:
        path = self._path(name)
        note = {"record": name, "options": dict(self.options), "starts": starts, "reason": reason}
        try:
            write_text(path, json.dumps(note, indent=1))
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); make room, or choose another --output"
            ) from error
