"""Runs a function on several processes of this machine, one thread each, connected by gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from .part import Tick

Groups = dict[int, dist.ProcessGroup]
"""The group of the first n ranks, by n."""


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, tick: Tick) -> Any:
    """Call `function(groups, tick, *arguments)` on each rank, and return what rank 0 returns. Only its ticks count.

    `function` is one of a module's own, and what it takes and returns can be pickled. If it fails on a rank, all are ended,
    and that rank's traceback is raised.
    """
    messages = processes.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        running = processes.spawn(
            _rank, (ranks, meeting, function, arguments, messages), nprocs=ranks, join=False, daemon=True
        )
        result = None
        done = False
        while not done:
            done = running.join(timeout=0.1)
            while not messages.empty():
                kind, value = messages.get()
                if kind == "tick":
                    tick(value)
                else:
                    result = value
    return result


def _rank(
    rank: int, ranks: int, meeting: str, function: Callable[..., Any], arguments: tuple[Any, ...], messages: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, ranks + 1)}
    result = function(groups, lambda text: messages.put(("tick", text)) if rank == 0 else None, *arguments)
    if rank == 0:
        messages.put(("result", result))
    dist.barrier()
    dist.destroy_process_group()
