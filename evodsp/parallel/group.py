"""The groups of ranks and their communication: the ranks that share one sample, the mesh (data, sequence), the ledger of
collectives, and the time that a rank waits for them.

The ranks of a sequence group share one sample. They have consecutive numbers. Launchers number ranks node by node, so a
sequence group lies within a node if it fits.

The ledger lists every collective in order, with its bytes. An all-gather counts the bytes of its output; a reduce-scatter
and an all-to-all those of their local input; an all-reduce twice its input; a broadcast and a reduce one copy of what is
sent. An all-gather or a reduce-scatter counts the same whether it is done at once or one shard at a time. A ring of sends
and receives, in which the shards of a tensor pass every rank, is one entry and counts as an all-gather of them. The part
that a rank sends to itself is included: (N - 1) / N of the count crosses the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evodsp.errors import UserError

Kind = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce", "send-receive"]
Phase = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True)
class Entry:
    """One collective that one rank took part in."""

    kind: Kind
    elements: int
    bytes: int
    phase: Phase
    """`backward`: a transpose, launched for gradients. `recompute`: a collective of the forward pass that activation
    checkpointing launches again inside the backward pass."""


@dataclass
class Ledger:
    """The collectives of one rank since the ledger was made."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, kind: Kind, elements: int, element_size: int, transposed: bool = False) -> None:
        """Record a collective that moves `elements` numbers of `element_size` bytes. `transposed`: whether it carries
        gradients.
        """
        phase: Phase = "backward" if transposed else "recompute" if _inside_backward_pass() else "forward"
        self.entries.append(Entry(kind, elements, elements * element_size, phase))

    def of(self, phase: Phase) -> list[Entry]:
        """The entries of one phase, in order."""
        return [entry for entry in self.entries if entry.phase == phase]

    def bytes(self, phase: Phase | None = None) -> int:
        """Bytes of all entries, or of one phase."""
        return sum(entry.bytes for entry in self.entries if phase is None or entry.phase == phase)


def _inside_backward_pass() -> bool:
    """Whether autograd is running a backward pass in this thread. A forward collective that is launched there belongs to a
    recomputation: activation checkpointing recomputes inside the backward pass without notice. torch has no public function
    for this; its own checkpointing calls the same private one."""
    return torch._C._current_graph_task_id() != -1


class WaitTimes:
    """Measures the waits for collectives of the groups that it was given to, between `begin` and `end`.

    On a CPU a wait is the time that the call takes. On a GPU the call returns at once, and the stream stands still until
    the communication is done; two events around the call measure this time. They are read at the end, so that nothing waits
    for them. Recording them takes microseconds of the host's time, so a run measures only some of its steps.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu, self._running = on_gpu, False
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def free(self) -> bool:
        """Whether measuring costs next to nothing."""
        return not self._on_gpu

    def begin(self) -> None:
        """Start measuring."""
        self._running, self._seconds, self._events = True, 0.0, []

    def wait(self, work: Any) -> None:
        """Wait for a collective that was launched with `async_op`."""
        if not self._running:
            work.wait()
        elif self._on_gpu:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            work.wait()
            after.record()
            self._events.append((before, after))
        else:
            begun = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - begun

    def end(self) -> float:
        """Seconds of waiting since `begin`, on the device if there is one. The host waits until the last wait is over."""
        self._running = False
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(before.elapsed_time(after) for before, after in self._events) / 1000


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


DATA, SEQUENCE = "data", "sequence"


@dataclass(frozen=True)
class Mesh:
    """`data` x `sequence` ranks. Rank r belongs to data rank r // `sequence`, and is number r mod `sequence` in its group."""

    devices: DeviceMesh

    @property
    def sequence(self) -> int:
        """Number of ranks that share a sample."""
        return self.devices[SEQUENCE].size()

    @property
    def data(self) -> int:
        """Number of samples that are processed at once."""
        return self.devices[DATA].size()

    @property
    def data_rank(self) -> int:
        """Number, among these samples, of the sample of this rank."""
        return self.devices[DATA].get_local_rank()

    def sequence_group(self, ledger: Ledger | None = None, waits: WaitTimes | None = None) -> Group:
        """The ranks that share this rank's sample. `ledger`: record of their collectives; `waits`: clock of the waits for
        them.
        """
        return Group(self.devices[SEQUENCE].get_group(), ledger, waits)

    def data_group(self) -> Group:
        """The ranks that hold the same shard of the other samples."""
        return Group(self.devices[DATA].get_group())

    def all_ranks(self) -> Group:
        """All ranks of the mesh."""
        return self.sequence_group() if self.data == 1 else whole_group()


Ranks = Mesh | DeviceMesh | dist.ProcessGroup | Group
"""A name for the ranks that share a tensor. A `Mesh` stands for its sequence group; a `DeviceMesh` must have one dimension."""


def group_of(ranks: Ranks) -> Group:
    """The group that `ranks` names. Raises ValueError for a DeviceMesh of several dimensions."""
    if isinstance(ranks, Group):
        return ranks
    if isinstance(ranks, Mesh):
        return ranks.sequence_group()
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise ValueError(f"{ranks} has {ranks.ndim} dimensions; choose one, for instance mesh['sequence']")
        return Group(ranks.get_group())
    return Group(ranks)


def whole_group() -> Group:
    """All ranks of the default process group."""
    return Group(dist.distributed_c10d._get_default_group())


def data_ranks(world: int, sequence: int) -> int:
    """Number of data ranks: `world` / `sequence`. Raises UserError if that is not a whole number."""
    if sequence < 1 or world % sequence:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(
            f"parallel.sequence is {sequence}, but the number of ranks, {world}, is not a multiple of it; "
            f"use one of {', '.join(map(str, divisors))}, or another number of devices"
        )
    return world // sequence


def own_group(groups: Tensor, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """This rank's group in a division of all ranks into groups. All ranks call this together.

    `groups` [groups, size]: the ranks of one group in each row. With NCCL all groups are made by one split of the communicator;
    made one by one, each would be a split of its own over all ranks.
    """
    whole = dist.distributed_c10d._get_default_group()
    if "nccl" in dist.get_backend() and whole.bound_device_id is not None:
        found = dist.split_group(split_ranks=groups.tolist(), timeout=timeout)
        assert found is not None  # every rank is in a row
        return found
    return dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0]


def init_mesh(sequence: int, device_type: str | None = None, timeout: timedelta | None = None) -> Mesh:
    """The mesh over all ranks of the default process group. Raises UserError if their number is no multiple of `sequence`.

    `device_type`: 'cpu' or 'cuda'; None: the default group's. `timeout`: time limit of one collective; None: torch's
    default.
    """
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu"
    world = dist.get_world_size()
    ranks = torch.arange(world).view(data_ranks(world, sequence), sequence)
    # `init_device_mesh` is not used, because its groups get torch's default time-out instead of the default group's.
    groups = [own_group(members, timeout=timeout) for members in (ranks.T, ranks)]
    return Mesh(DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=(DATA, SEQUENCE)))
