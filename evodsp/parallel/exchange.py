"""What a module asks of the other shards of a representation.

A module of the model is written for one device. Where it needs something that other shards hold it asks its `Exchange`, by
the NAME of the axis (`layout.DIMENSION` says where each stands). `LocalExchange` is the exchange of one device: every answer
is what was given. `ShardedExchange` does the collectives. Model code therefore has no `if world_size > 1`.

Each question has two forms: `switch` and the like answer at once; `start_switch` and the like return a `Pending` whose
`wait()` gives the answer, so that computation can go on meanwhile. `whole` is the true size of the axis over all shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from evodsp.parallel.collectives import Broadcast, Collective, Gather, Reduce, ScatterSum, Sum, Switch, maximum
from evodsp.parallel.group import Group
from evodsp.parallel.layout import DIMENSION, Axis, shard_sizes, shard_slice
from evodsp.parallel.ledger import Kind
from evodsp.parallel.pending import Pending, Ready, start


class Exchange(ABC):
    """The linear maps between shards. Each one's backward is its exact transpose."""

    @abstractmethod
    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        """All-to-all: `x` sharded along `from_axis`, `whole` entries in all, comes back sharded along `to_axis`."""

    @abstractmethod
    def start_gather(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        """All-gather: `x` sharded along `axis`, `whole` entries in all, comes back whole."""

    @abstractmethod
    def start_scatter_sum(self, x: Tensor, axis: Axis) -> Pending:
        """Reduce-scatter: partial sums, whole along `axis`, are added over ranks; each rank keeps its shard of `axis`."""

    @abstractmethod
    def start_sum(self, x: Tensor) -> Pending:
        """All-reduce: partial sums are added over ranks; every rank has the total."""

    @abstractmethod
    def start_broadcast(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        """One shard of a gather: shard number `root` of `x` along `axis`, on every rank."""

    @abstractmethod
    def start_reduce(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        """One shard of a scatter_sum: every rank's part of shard number `root` is added up there; elsewhere comes zero."""

    @abstractmethod
    def shards(self, whole: int) -> list[slice]:
        """The entries of every shard, in order, of an axis of `whole` entries."""

    @abstractmethod
    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks, outside the graph (it only stabilises a softmax)."""

    def keeping(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a computation and of its repetition (`context_fn` of torch's checkpoint): what the first gathered or
        summed is kept, and given to the second without communication."""
        return nullcontext(), nullcontext()

    @abstractmethod
    def owned(self, whole: int) -> slice:
        """The entries that are this rank's, of an axis of `whole` entries."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """How many shards there are. A loss that counts this rank's share of a sum counts it so many times (the mean over
        ranks of their losses is the loss)."""

    def shard(self, x: Tensor, axis: Axis) -> Tensor:
        """This rank's shard of a tensor that every rank holds whole. Its transpose pads with zeros."""
        return x[(slice(None),) * DIMENSION[axis] + (self.owned(x.shape[DIMENSION[axis]]),)]

    def switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Tensor:
        return self.start_switch(x, from_axis, to_axis, whole).wait()

    def gather(self, x: Tensor, axis: Axis, whole: int) -> Tensor:
        return self.start_gather(x, axis, whole).wait()

    def scatter_sum(self, x: Tensor, axis: Axis) -> Tensor:
        return self.start_scatter_sum(x, axis).wait()

    def sum(self, x: Tensor) -> Tensor:
        return self.start_sum(x).wait()


class LocalExchange(Exchange):
    """The exchange of one device: the whole representation is here, so every answer is what was given."""

    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        return Ready(x)

    def start_gather(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        return Ready(x)

    def start_scatter_sum(self, x: Tensor, axis: Axis) -> Pending:
        return Ready(x)

    def start_sum(self, x: Tensor) -> Pending:
        return Ready(x)

    def start_broadcast(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        return Ready(x)

    def start_reduce(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        return Ready(x)

    def shards(self, whole: int) -> list[slice]:
        return [slice(0, whole)]

    def max(self, x: Tensor) -> Tensor:
        return x.detach()

    def owned(self, whole: int) -> slice:
        return slice(0, whole)

    @property
    def ranks(self) -> int:
        return 1


class ShardedExchange(Exchange):
    """The exchange of one rank of a group.

    `overlap` False waits for each collective where it is launched: for measuring, and for finding mistakes. `dtype`: what
    numbers travel as (None: as they are); sums are added up in that precision too.
    """

    def __init__(self, group: Group, overlap: bool = True, dtype: torch.dtype | None = None) -> None:
        self.group, self.overlap, self.dtype = group, overlap, dtype
        self._tape: _Tape | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedExchange:
        """Copies of a model belong to the same group; its handle cannot be copied anyway."""
        return self

    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        source, target = DIMENSION[from_axis], DIMENSION[to_axis]
        size = self.group.size
        return self._start(
            x, Switch(self.group, source, target, shard_sizes(whole, size), shard_sizes(x.shape[target], size))
        )

    def start_gather(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        return self._start(x, Gather(self.group, DIMENSION[axis], shard_sizes(whole, self.group.size)))

    def start_scatter_sum(self, x: Tensor, axis: Axis) -> Pending:
        dim = DIMENSION[axis]
        return self._start(x, ScatterSum(self.group, dim, shard_sizes(x.shape[dim], self.group.size)))

    def start_sum(self, x: Tensor) -> Pending:
        return self._start(x, Sum(self.group))

    def start_broadcast(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        return self._start(x, Broadcast(self.group, root, DIMENSION[axis], shard_sizes(whole, self.group.size)))

    def start_reduce(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        return self._start(x, Reduce(self.group, root, DIMENSION[axis], shard_sizes(whole, self.group.size)))

    def shards(self, whole: int) -> list[slice]:
        return [shard_slice(whole, self.group.size, rank) for rank in range(self.group.size)]

    def max(self, x: Tensor) -> Tensor:
        if self._tape is not None and self._tape.replaying:
            return self._tape.next()
        total = maximum(x, self.group)
        if self._tape is not None:
            self._tape.results.append(total)
        return total

    def owned(self, whole: int) -> slice:
        return shard_slice(whole, self.group.size, self.group.rank)

    @property
    def ranks(self) -> int:
        return self.group.size

    def keeping(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        results: list[Tensor | None] = []
        return self._with_tape(results, replaying=False), self._with_tape(results, replaying=True)

    @contextmanager
    def _with_tape(self, results: list[Tensor | None], replaying: bool) -> Iterator[None]:
        before, self._tape = self._tape, _Tape(results, replaying)
        try:
            yield
        finally:
            self._tape = before

    def _start(self, x: Tensor, collective: Collective) -> Pending:
        keeps = self._tape is not None and collective.kind in KEPT
        if self._tape is None or not keeps:
            return self._launched(x, collective)
        if self._tape.replaying:
            return Ready(self._tape.next().requires_grad_(x.requires_grad))
        self._tape.results.append(None)
        return _Recorded(self._launched(x, collective), self._tape.results, len(self._tape.results) - 1)

    def _launched(self, x: Tensor, collective: Collective) -> Pending:
        pending: Pending = start(x, collective) if self.dtype is None else _Cast(x, collective, self.dtype)
        return pending if self.overlap else Ready(pending.wait())


KEPT: tuple[Kind, ...] = ("all-gather", "all-reduce")
"""Collectives whose results `keeping` keeps: they are small (biases, one operand, sums). A switch's result is as large as the
activations that are recomputed, so it is communicated again."""


@dataclass
class _Tape:
    """Results of collectives in the order of their launch, being recorded or replayed."""

    results: list[Tensor | None]
    replaying: bool
    place: int = 0

    def next(self) -> Tensor:
        """The next result, as a leaf of the graph that the repetition builds."""
        result = self.results[self.place]
        self.place += 1
        if result is None:
            raise RuntimeError("a collective was launched but not awaited in the computation that is repeated")
        return result.detach()


class _Recorded(Pending):
    """A result that goes onto the tape when it has come."""

    def __init__(self, pending: Pending, results: list[Tensor | None], place: int) -> None:
        self._pending, self._results, self._place = pending, results, place

    def wait(self, keep: bool = False) -> Tensor:
        result = self._pending.wait(keep)
        self._results[self._place] = result.detach()
        return result


class _Cast(Pending):
    """A collective whose numbers travel in another precision, there and back."""

    def __init__(self, x: Tensor, collective: Collective, dtype: torch.dtype) -> None:
        self._pending, self._dtype = start(x.to(dtype), collective), x.dtype

    def wait(self, keep: bool = False) -> Tensor:
        return self._pending.wait(keep).to(self._dtype)
