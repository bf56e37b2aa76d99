"""Notes of records that are being computed, so that a record that kills a rank is not begun for ever.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.inference.config import PredictConfig
from evodsp.inference.failures import Failure
from evodsp.inference.memory_errors import LESS_MEMORY
from evodsp.launch.consensus import from_first
from evodsp.parallel.group import Group
from evodsp.printing import tell
from evodsp.reading.quoting import one_line

_STARTS = 2
"""A record that ended so many starts is left out."""


@contextmanager
def noted(config: PredictConfig, name: str, group: Group | None) -> Iterator[Failure | None]:
    """Within this context a note says that the record is being computed. Yields why it is left out instead, if it is.

    All ranks of the `group` that computes it call this; the first one writes. Raises UserError if that is impossible.
    """
    made = [folder for folder in (config.output, *config.output.parents) if not folder.exists()]
    left_out = from_first(partial(_begin, config, name), group)
    try:
        yield left_out
    except (KeyboardInterrupt, UserError):
        _forget(config, name, made, group)
        raise
    if left_out is None:
        _forget(config, name, made, group)


def note_progress(config: PredictConfig, name: str) -> None:
    """Note that something of this record is finished: the starts before this one do not count against it any more."""
    _write(config, name, 1)


def give_up(config: PredictConfig, failure: Failure) -> NoReturn:
    """Note why the next start is to leave a record out, say so, and end this process: the others cannot go on with it."""
    with suppress(UserError):  # this rank may be on a machine without the output folder
        _write(config, failure.name, _STARTS, failure.reason)
    again = "the same command without --overwrite" if config.overwrite else "the same command"
    tell(
        f"evodsp: error: {one_line(failure.reason)}. The other ranks wait for this one, so the run ends; {again} leaves this "
        "record out and keeps what is finished"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _begin(config: PredictConfig, name: str) -> Failure | None:
    path = _path(config, name)
    starts, reason = _read(path, _options(config))
    if starts < _STARTS:
        _write(config, name, starts + 1)
        return None
    why = f"{name}: left out, because {starts} runs ended while they computed it, probably for want of memory; {LESS_MEMORY}"
    return Failure(name, f"{reason or why}; or delete {path} to try it again")


def _forget(config: PredictConfig, name: str, made: list[Path], group: Group | None) -> None:
    """Remove the note, and those of the folders `made` for it that nothing else is in."""
    if group is not None and group.rank > 0:
        return
    with suppress(OSError):
        _path(config, name).unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()


def _path(config: PredictConfig, name: str) -> Path:
    """No record's own folder: their names do not begin with a dot."""
    return config.output / f".{name}.begun"


def _options(config: PredictConfig) -> dict[str, str]:
    """What decides how much memory a record needs, and how much there is."""
    names = (
        "device",
        "precision",
        "working_memory",
        "msa_clusters",
        "extra_msa",
        "ensembles",
        "kernels",
        "plan",
        "parallel",
    )
    return {name: str(getattr(config, name)) for name in names}


def _read(path: Path, options: dict[str, str]) -> tuple[int, str | None]:
    """How many starts with these options ended in the record, and why, if that is known."""
    try:
        note: Any = json.loads(path.read_text(encoding="utf-8"))
        if note["options"] != options:
            return 0, None
        reason = note["reason"]
        return int(note["starts"]), None if reason is None else one_line(str(reason))
    except OSError:
        return 0, None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a full disk, or somebody's own file
        return 1, None


def _write(config: PredictConfig, name: str, starts: int, reason: str | None = None) -> None:
    path = _path(config, name)
    note = {"record": name, "options": _options(config), "starts": starts, "reason": reason}
    try:
        with whole_file(path) as partial_file:
            partial_file.write_text(json.dumps(note, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another --output"
        ) from error
