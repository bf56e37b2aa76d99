"""The group of ranks that share one sample, and its communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.ledger import Ledger
from evodsp.parallel.waits import WaitTimes

# torch 2.13 renamed these functions and deprecates the old names; older releases only have the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_GATHERED, _SUMMED = 100_000, 1_000
"""Largest number of elements per rank that gloo gathers, or sums for all ranks, in one exchange. With more, an exchange is
no faster than rounds, or its copies take memory."""


@dataclass
class _Exchanged:
    """A running all-to-all, and the reduction to apply when it has finished."""

    work: Any
    finish: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.finish()


class Group:
    """A process group, the ledger in which its collectives are entered, and the clock that measures waits for them.

    Its methods begin a communication between contiguous buffers and return an object with `wait()`. The planner replaces
    them by methods that communicate nothing (`evodsp.planner.trace`).
    """

    def __init__(self, handle: dist.ProcessGroup, ledger: Ledger | None = None, waits: WaitTimes | None = None) -> None:
        """`ledger`: record of the collectives; None keeps none. `waits`: clock of the waits; None measures nothing."""
        self.handle, self.ledger, self.waits = handle, ledger, waits
        # Both are stored, because PyTorch looks them up in dictionaries and a step of a small model reads them hundreds of
        # times.
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        """This process's rank within the group, and the number of ranks."""

    @property
    def name(self) -> str:
        """The name under which operators of a compiled graph find the process group."""
        return self.handle.group_name

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Any:
        """`arriving`, `leaving`: number of elements from each rank, and to each rank."""
        return dist.all_to_all_single(received, sent, list(arriving), list(leaving), group=self.handle, async_op=True)

    @cached_property
    def _by_gloo(self) -> bool:
        """Whether gloo communicates, as on CPUs.

        It gathers and sums in rounds, each of which takes as long as an all-to-all, and its reduce-scatter sums everything
        on every rank. One all-to-all and a local sum take 0.3 to 1.0 of the time (scripts/benchmarks/results/gloo.txt).
        Terms are added in the order of the ranks, so that a sum has the same bits on all of them.
        """
        return dist.get_backend(self.handle) == dist.Backend.GLOO

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """The tensors of all ranks, concatenated in the order of the ranks."""
        if self._by_gloo and sent.numel() <= _GATHERED:
            counts = [sent.numel()] * self.size
            copies = sent.reshape(1, -1).repeat(self.size, 1)
            return self.all_to_all(received.view(-1), copies.view(-1), counts, counts)
        return _all_gather(received, sent, group=self.handle, async_op=True)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> Any:
        """This rank's part of the sum of all ranks' tensors."""
        if not self._by_gloo:
            return _reduce_scatter(received, sent, group=self.handle, async_op=True)
        counts = [received.numel()] * self.size
        parts = torch.empty_like(sent).view(self.size, received.numel())
        work = self.all_to_all(parts.view(-1), sent.view(-1), counts, counts)
        return _Exchanged(work, lambda: torch.sum(parts, 0, dtype=sent.dtype, out=received.view(-1)))

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        """The sum over all ranks, or the elementwise maximum, in place."""
        if self._by_gloo and x.numel() <= _SUMMED:
            parts = x.new_empty(self.size, x.numel())
            over = torch.amax if maximum else partial(torch.sum, dtype=x.dtype)
            return _Exchanged(self.all_gather(parts, x), lambda: over(parts, 0, out=x.view(-1)))
        return dist.all_reduce(x, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.handle, async_op=True)

    def broadcast(self, x: Tensor, root: int) -> Any:
        """The tensor of rank `root` of this group, in place."""
        return dist.broadcast(x, group_src=root, group=self.handle, async_op=True)

    def reduce(self, x: Tensor, root: int) -> Any:
        """The sum over all ranks, in place on rank `root` of this group; the buffers of the other ranks are then undefined."""
        return dist.reduce(x, group_dst=root, group=self.handle, async_op=True)


class Place(Group):
    """A rank's place in a group without processes, to count or plan on shapes. It cannot communicate."""

    def __init__(self, rank: int, size: int, ledger: Ledger | None = None) -> None:
        self.rank, self.size, self.ledger, self.waits = rank, size, ledger, None
