"""The linear maps between the shards of a group of ranks, each with its exact transpose.

The ranks of a group are ONE program, and a collective is a linear map of all their tensors. Its backward is that map's
transpose: switch <-> switch reversed, all-gather <-> reduce-scatter, sum <-> sum, broadcast <-> reduce. (A gather whose
backward is a slice, as often seen, drops the gradients of all other ranks' uses.)

A `Collective` knows shapes and communicates; it knows nothing of autograd. `evodsp.parallel.exchange` puts one into the
graph.

A representation is `[batch, axis 1, axis 2, channels]`: the MSA `[B, seq, res, c]`, the pair `[B, i, j, c]`. Shards have the
sizes that `torch.tensor_split` gives: the first `whole mod ranks` shards have one entry more. A shard may be empty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evodsp.parallel.config import Axis
from evodsp.parallel.group import Group, Kind, WaitTimes

DIMENSION: dict[Axis, int] = {"seq": 1, "res": 2, "i": 1, "j": 2, "channel": 3}
"""Dimension of each axis."""


def shard_sizes(whole: int, ranks: int) -> tuple[int, ...]:
    """Size of each rank's shard of an axis of size `whole`."""
    least, more = divmod(whole, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def shard_slice(whole: int, ranks: int, rank: int) -> slice:
    """The part of an axis of size `whole` that `rank` holds."""
    least, more = divmod(whole, ranks)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))


# The same collectives as operators of a compiled graph. They return the receive buffer. There is no `reduce`.
_traced = torch.ops._c10d_functional


@dataclass
class Transfer:
    """A communication under way."""

    work: Any
    pieces: tuple[Tensor, ...]
    """Receive buffers, whose concatenation along `dim` is the result."""
    dim: int
    sent: Tensor | None
    """Send buffer; kept until the communication is done."""
    waits: WaitTimes | None = None
    """Clock that measures the wait; None measures nothing."""

    def wait(self) -> Tensor:
        """Wait for the communication and return its result."""
        if self.waits is None:
            self.work.wait()
        else:
            self.waits.wait(self.work)
        self.sent = None
        return _joined(self.pieces, self.dim)


class Collective(ABC):
    """A linear map between the shards of a group."""

    group: Group
    kind: Kind

    @abstractmethod
    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        """Start communicating this rank's `x`. `backward`: whether `x` is a gradient (for the ledger)."""

    @abstractmethod
    def traced(self, x: Tensor) -> Tensor:
        """`launch` as an operator of a torch.compile graph. Returns the receive buffer. The ledger gets no entry."""

    @abstractmethod
    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the receive buffer, from the shape of the input."""

    @abstractmethod
    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        """Views of the receive buffer, and the dimension along which they are concatenated. `shape`: shape of the input."""

    def arrived(self, received: Tensor, shape: Sequence[int]) -> Tensor:
        """The result, from a receive buffer that is complete. `shape`: shape of the input."""
        return _joined(*self.pieces(received, shape))

    @abstractmethod
    def transpose(self) -> Collective:
        """The transposed map, which the backward pass applies to gradients."""

    @abstractmethod
    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's result, from the shape of its input."""

    @abstractmethod
    def volume(self, shape: Sequence[int]) -> int:
        """Number of elements that the ledger counts for an input of this shape (by the rules of `evodsp.parallel.group`)."""

    def _transfer(self, work: Any, received: Tensor, shape: Sequence[int], sent: Tensor) -> Transfer:
        """The transfer that `launch` returns. `shape`: shape of the input."""
        return Transfer(work, *self.pieces(received, shape), sent, self.group.waits)

    def _record(self, buffer: Tensor, backward: bool, times: int = 1) -> None:
        if self.group.ledger is not None:
            self.group.ledger.add(self.kind, times * buffer.numel(), buffer.element_size(), backward)


@dataclass(frozen=True)
class Switch(Collective):
    """All-to-all: the sharded dimension changes from `source` to `target`. The sizes of all ranks' shards are given."""

    group: Group
    source: int
    target: int
    source_sizes: tuple[int, ...]
    target_sizes: tuple[int, ...]
    kind: Kind = "all-to-all"

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        sent = self._packed(x)
        received = x.new_empty(self.buffer_shape(x.shape))
        arriving, leaving = self._counts(x.shape)
        work = self.group.all_to_all(received, sent, arriving, leaving)
        self._record(sent, backward)
        return self._transfer(work, received, x.shape, sent)

    def traced(self, x: Tensor) -> Tensor:
        return _traced.all_to_all_single(self._packed(x), *self._counts(x.shape), self.group.name)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (math.prod(self.result_shape(shape)),)

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        return _pieces(received, self._arriving(shape), self.result_shape(shape), self.source), self.source

    def _packed(self, x: Tensor) -> Tensor:
        _check_size(x, self.source, self.source_sizes[self.group.rank])
        _check_size(x, self.target, sum(self.target_sizes))
        return _packed(x, self.target, self.target_sizes)

    def _arriving(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shape of the block from each rank."""
        own = self.target_sizes[self.group.rank]
        return [_resized(shape, {self.source: size, self.target: own}) for size in self.source_sizes]

    def _counts(self, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """Number of elements from each rank, and to each rank."""
        line = math.prod(shape) // max(1, sum(self.target_sizes))
        return [math.prod(part) for part in self._arriving(shape)], [line * size for size in self.target_sizes]

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        rank = self.group.rank
        return _resized(shape, {self.source: sum(self.source_sizes), self.target: self.target_sizes[rank]})

    def volume(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def transpose(self) -> Switch:
        return Switch(self.group, self.target, self.source, self.target_sizes, self.source_sizes)


@dataclass(frozen=True)
class Gather(Collective):
    """All-gather: from shards along `dim` to the whole tensor on every rank."""

    group: Group
    dim: int
    sizes: tuple[int, ...]
    kind: Kind = "all-gather"

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        sent = self._padded(x)
        received = x.new_empty(self.buffer_shape(x.shape))
        work = self.group.all_gather(received, sent)
        self._record(received, backward)
        return self._transfer(work, received, x.shape, sent)

    def traced(self, x: Tensor) -> Tensor:
        return _traced.all_gather_into_tensor(self._padded(x), self.group.size, self.group.name)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _in_front(shape, self.dim, len(self.sizes) * max(self.sizes))

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        if min(self.sizes) == max(self.sizes):
            return (received.movedim(0, self.dim),), self.dim
        parts = received.unflatten(0, (len(self.sizes), max(self.sizes)))
        return tuple(p[:size].movedim(0, self.dim) for p, size in zip(parts, self.sizes, strict=True)), self.dim

    def _padded(self, x: Tensor) -> Tensor:
        """The shard padded to the size of the largest, because sizes may differ by one. With `dim` in front, unpadding is a
        view.
        """
        _check_size(x, self.dim, self.sizes[self.group.rank])
        front, largest = x.movedim(self.dim, 0), max(self.sizes)
        if front.shape[0] == largest:
            return front.contiguous()
        sent = front.new_zeros(largest, *front.shape[1:])
        sent[: front.shape[0]] = front
        return sent

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _resized(shape, {self.dim: sum(self.sizes)})

    def volume(self, shape: Sequence[int]) -> int:
        return math.prod(_resized(shape, {self.dim: len(self.sizes) * max(self.sizes)}))

    def transpose(self) -> ScatterSum:
        return ScatterSum(self.group, self.dim, self.sizes)


@dataclass(frozen=True)
class ScatterSum(Collective):
    """Reduce-scatter: this rank's shard, along `dim`, of the sum of every rank's whole tensor."""

    group: Group
    dim: int
    sizes: tuple[int, ...]
    kind: Kind = "reduce-scatter"

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        sent = self._padded(x)
        received = x.new_empty(self.buffer_shape(x.shape))
        work = self.group.reduce_scatter(received, sent)
        self._record(sent, backward)
        return self._transfer(work, received, x.shape, sent)

    def traced(self, x: Tensor) -> Tensor:
        return _traced.reduce_scatter_tensor(self._padded(x), "sum", self.group.size, self.group.name)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _in_front(shape, self.dim, max(self.sizes))

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        return (received[: self.sizes[self.group.rank]].movedim(0, self.dim),), self.dim

    def _padded(self, x: Tensor) -> Tensor:
        """All shards of `x`, padded to the size of the largest, with `dim` in front."""
        _check_size(x, self.dim, sum(self.sizes))
        front, largest = x.movedim(self.dim, 0), max(self.sizes)
        if min(self.sizes) == largest:
            return front.contiguous()
        sent = front.new_zeros(len(self.sizes), largest, *front.shape[1:])
        for part, values in zip(sent, front.split(self.sizes), strict=True):
            part[: len(values)] = values
        return sent.flatten(0, 1)

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _resized(shape, {self.dim: self.sizes[self.group.rank]})

    def volume(self, shape: Sequence[int]) -> int:
        return math.prod(_resized(shape, {self.dim: len(self.sizes) * max(self.sizes)}))

    def transpose(self) -> Gather:
        return Gather(self.group, self.dim, self.sizes)


@dataclass(frozen=True)
class Sum(Collective):
    """All-reduce: every rank gets the sum of all ranks' tensors."""

    group: Group
    kind: Kind = "all-reduce"

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        total = x.clone(memory_format=torch.contiguous_format)
        work = self.group.all_reduce(total)
        self._record(total, backward, times=2)
        return self._transfer(work, total, x.shape, total)

    def traced(self, x: Tensor) -> Tensor:
        return _traced.all_reduce(x.contiguous(), "sum", self.group.name)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        return (received,), 0

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def volume(self, shape: Sequence[int]) -> int:
        return 2 * math.prod(shape)

    def transpose(self) -> Sum:
        return self


@dataclass(frozen=True)
class Broadcast(Collective):
    """Broadcast: one shard of an all-gather. Every rank gets rank `root`'s shard along `dim`."""

    group: Group
    root: int
    dim: int
    sizes: tuple[int, ...]
    kind: Kind = "broadcast"

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        buffer = self._buffer(x)
        work = self.group.broadcast(buffer, self.root)
        self._record(buffer, backward)
        return self._transfer(work, buffer, x.shape, buffer)

    def traced(self, x: Tensor) -> Tensor:
        return _traced.broadcast(self._buffer(x), self.root, self.group.name)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.result_shape(shape)

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        return (received,), self.dim

    def _buffer(self, x: Tensor) -> Tensor:
        rank = self.group.rank
        _check_size(x, self.dim, self.sizes[rank])
        return x.contiguous() if rank == self.root else x.new_empty(self.buffer_shape(x.shape))

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _resized(shape, {self.dim: self.sizes[self.root]})

    def volume(self, shape: Sequence[int]) -> int:
        return math.prod(self.result_shape(shape))

    def transpose(self) -> Reduce:
        return Reduce(self.group, self.root, self.dim, self.sizes)


@dataclass(frozen=True)
class Reduce(Collective):
    """Reduce: one shard of a reduce-scatter. Rank `root` gets the sum of all ranks' tensors, the other ranks get zeros."""

    group: Group
    root: int
    dim: int
    sizes: tuple[int, ...]
    kind: Kind = "reduce"

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        _check_size(x, self.dim, self.sizes[self.root])
        total = x.clone(memory_format=torch.contiguous_format)
        work = self.group.reduce(total, self.root)
        self._record(total, backward)
        return self._transfer(work, total, x.shape, total)

    def traced(self, x: Tensor) -> Tensor:
        """An all-reduce, which moves twice the bytes, because no operator of a graph reduces to one rank."""
        _check_size(x, self.dim, self.sizes[self.root])
        return _traced.all_reduce(x.contiguous(), "sum", self.group.name)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        own = received if self.group.rank == self.root else received.new_zeros(self.result_shape(shape))
        return (own,), self.dim

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _resized(shape, {self.dim: self.sizes[self.group.rank]})

    def volume(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def transpose(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.dim, self.sizes)


def shard(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole. The transpose pads with zeros, without communication."""
    return x[(slice(None),) * (dim % x.ndim) + (shard_slice(x.shape[dim], group.size, group.rank),)]


def maximum(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum over the group, without gradient."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    work = group.all_reduce(total, maximum=True)
    Transfer(work, (total,), 0, None, group.waits).wait()
    if group.ledger is not None:
        group.ledger.add("all-reduce", 2 * total.numel(), total.element_size())
    return total


def _packed(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, flattened and joined. This takes no copy if memory already has this order, one copy if
    all parts are equally large, and otherwise one copy per part.
    """
    if math.prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    if min(sizes) == max(sizes):
        return x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0).reshape(-1)
    flat, start = x.new_empty(x.numel()), 0
    for part in x.split(list(sizes), dim):
        flat[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    return flat


def _pieces(flat: Tensor, shapes: list[tuple[int, ...]], whole: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    """Views of the parts in `flat`, to be concatenated along `dim`; a single view if memory already has the order of the
    result.
    """
    if math.prod(whole[:dim]) == 1:
        return (flat.view(whole),)
    parts = flat.split([math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _joined(pieces: tuple[Tensor, ...], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _in_front(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with axis `dim` moved to the front and its size replaced."""
    return (size, *shape[:dim], *shape[dim + 1 :])


def _resized(shape: Sequence[int], sizes: dict[int, int]) -> tuple[int, ...]:
    """`shape` with the sizes of some axes replaced."""
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def _check_size(x: Tensor, dim: int, size: int) -> None:
    """Raise ValueError for a shard of a wrong size, with which the group would hang or mix up data."""
    if x.shape[dim] != size:
        raise ValueError(f"shard of shape {tuple(x.shape)}: axis {dim} has {x.shape[dim]} entries, expected {size}")
