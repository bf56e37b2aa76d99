"""The device of a prediction: its name, the memory that layers may use there, the peaks that were measured, and the end
of memory as one line that says what to change.

Notes of attempts: which records are being computed, so that a record that kills a rank is not tried for ever.

A rank that is killed, mostly for want of memory, says nothing, and leaves the others in a collective from which nothing gets
them out: the run ends. So a file `.<name>.begun` in the output folder says that a record is being computed. It is removed
when the record is done or has failed, and by Ctrl-C. The next start computes the record once more, because a job may end for
other reasons; if that start ends there too, later ones leave the record out and say how to try it again. A rank that finds
by itself that it has no memory left notes the reason, and the next start leaves the record out at once. A start with other
options that decide about memory tries it anew.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from evodsp.errors import UserError, memory_size
from evodsp.files import write_text
from evodsp.inference.results import RecordFailure
from evodsp.launch.consensus import all_of, from_first
from evodsp.parallel.group import Group
from evodsp.planner.prediction import WORKING_CPU, WORKING_SHARE
from evodsp.printing import one_line, tell

LESS_MEMORY = "lower --working_memory, --msa_clusters and --extra_msa, take --precision bf16, raise --parallel.sequence"
"""Advice to a user: options that take less memory."""
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def device_of(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one. Raises UserError if there is no such device here.

    The device is only named, not touched: touching `cuda` before a rank has taken its own GPU would cost each rank some hundred
    MiB of GPU 0, for a context there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrong = UserError(f"--device is '{name}', which PyTorch cannot use here; use cpu or auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise wrong
    if device.type != "cuda":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise wrong from error
    return device


def working_memory(setting: str, device: torch.device) -> int | None:
    """The bytes of `PredictConfig.working_memory`; None: no limit.

    `auto` is the same in every run on a kind of device, because products of other sizes are rounded differently.
    """
    if setting == "all":
        return None
    if setting != "auto":
        return memory_size("--working_memory", setting)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // WORKING_SHARE
    return WORKING_CPU


def check_pair_fits(name: str, residues: int, needed: int, device: torch.device) -> None:
    """Raise UserError if a rank's share of the pair representation alone is larger than all memory of its device: then a pass
    cannot fit, and Linux may end the process instead of refusing the memory. `needed`: the bytes of this share."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise UserError(
            f"{name}: {residues:,} residues do not fit; the pair representation alone takes {needed / 2**30:,.0f} GiB on each "
            f"rank, and there are {there / 2**30:,.0f}; raise --parallel.sequence, or split the sequence into domains"
        )


def memory_entries(device: torch.device, group: Group | None) -> dict[str, Any]:
    """The memory entries of timings.json: the highest peak of all ranks, and on several ranks each one's."""
    local = _peak_memory(device)
    if group is None:
        return local
    ranks = all_of({"host": socket.gethostname(), "device": str(device), **local}, group)
    highest = max(ranks, key=lambda rank: rank["peak_memory_mib"])
    names = ("peak_memory_mib", "peak_memory_of")
    return {
        **{name: highest[name] for name in names},
        "ranks": [{"rank": number, **rank} for number, rank in enumerate(ranks)],
    }


def _peak_memory(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"peak_memory_mib": torch.cuda.max_memory_allocated(device) >> 20, "peak_memory_of": "GPU, this target"}
    # kilobytes on Linux, bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
    return {"peak_memory_mib": peak, "peak_memory_of": "process, so far"}


class RankOutOfMemoryError(Exception):
    """A rank of several has no memory left. The others wait for it in a collective, so it cannot go on with them."""

    def __init__(self, failure: RecordFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@contextmanager
def memory_errors(name: str, residues: int, device: torch.device, group: Group | None = None) -> Iterator[None]:
    """Turn the end of memory, of a GPU or of this machine, into a UserError that says what to change.

    `group`: the ranks that compute together here. The others wait for a rank whose memory ends, so it raises
    RankOutOfMemoryError.
    """
    try:
        yield
    except (
        MemoryError,
        RuntimeError,
    ) as error:  # torch.OutOfMemoryError, and what PyTorch raises on a CPU, are RuntimeErrors
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        if not on_gpu and not isinstance(error, MemoryError) and _CPU_ALLOCATOR not in str(error):
            raise
        where = f"the memory of this GPU ({device})" if on_gpu else "the memory of this machine"
        instead = ", or use --device cpu" if on_gpu else ""
        reason = f"{name}: {residues:,} residues do not fit into {where}; {LESS_MEMORY}{instead}"
        raise UserError(reason) if group is None else RankOutOfMemoryError(RecordFailure(name, reason)) from error


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
        """The number of starts with these options that ended in the record, and the reason, if it is known."""
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
