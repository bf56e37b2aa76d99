"""The ranks among which one sample is sharded, and how they communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.ledger import Ledger
from evodsp.parallel.waits import WaitTimes

# torch 2.13 renamed these and deprecates the old names, which older releases only have.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Group:
    """A process group, the ledger in which its collectives are entered, and the clock that measures waits for them.

    Its methods begin a communication between contiguous buffers and return what to `wait()` for. The planner replaces them by
    ones that communicate nothing (`evodsp.planner.imagined`).
    """

    def __init__(self, handle: dist.ProcessGroup, ledger: Ledger | None = None, waits: WaitTimes | None = None) -> None:
        """`ledger`: None enters them nowhere. `waits`: None measures nothing."""
        self.handle, self.ledger, self.waits = handle, ledger, waits

    @property
    def name(self) -> str:
        """The name under which operators of a compiled graph find the process group."""
        return self.handle.group_name

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.handle)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.handle)

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Any:
        """`arriving`, `leaving`: how many numbers come from each rank, and go to each."""
        return dist.all_to_all_single(received, sent, list(arriving), list(leaving), group=self.handle, async_op=True)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """What all ranks send, one rank's after another."""
        return _all_gather(received, sent, group=self.handle, async_op=True)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> Any:
        """This rank's part of the sum of what all ranks send."""
        return _reduce_scatter(received, sent, group=self.handle, async_op=True)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        """The sum over all ranks, or the elementwise maximum, in place."""
        return dist.all_reduce(x, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.handle, async_op=True)

    def broadcast(self, x: Tensor, root: int) -> Any:
        """The tensor of rank `root` of this group, in place."""
        return dist.broadcast(x, group_src=root, group=self.handle, async_op=True)

    def reduce(self, x: Tensor, root: int) -> Any:
        """The sum over all ranks, in place on rank `root` of this group; the others' contents are then undefined."""
        return dist.reduce(x, group_dst=root, group=self.handle, async_op=True)


class Place(Group):
    """A rank's place in a group without processes, for what is counted or planned on shapes. It cannot communicate."""

    def __init__(self, rank: int, size: int, ledger: Ledger | None = None) -> None:
        self.ledger, self.waits = ledger, None
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size
