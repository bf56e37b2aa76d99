"""The device of a prediction: its name, the memory that layers may use there, the peaks that were measured, and the end of
memory as one line that says what to change."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from evodsp.errors import UserError, memory_size
from evodsp.inference.failures import RecordFailure
from evodsp.launch.consensus import all_of
from evodsp.parallel.group import Group
from evodsp.planner.prediction import WORKING_CPU, WORKING_SHARE

LESS_MEMORY = "lower --working_memory, --msa_clusters and --extra_msa, take --precision bf16, raise --parallel.sequence"
"""What a user can change."""
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
