"""A representation of which every rank of a group holds one shard: the notation in which blocks are written.

    pair += dropout(layer(pair), masks)     the residual sum: add a sub-layer's update
    rows = pair.switch("i")                 the same representation, sharded along another axis

On one device `switch` does nothing. Without gradients, and with a memory budget, both write into the representation itself.

**Pieces.** A sub-layer's intermediates are several times as large as its representation: a hidden layer has four times its
channels; queries, keys, values and gates have as many again. But most sub-layers treat the rows (or columns) of a
representation one by one. Within a budget such an update is computed for a few rows at a time and added to these rows; rows
that have been changed are not read again. Tensors that must be whole are computed first (`collect`): the bias of attention,
or the product of triangle multiplication. A sub-layer states once what it computes from its rows. This module decides whether
that happens for all rows at once or piece by piece. On several ranks every rank makes the same number of pieces, because
pieces may communicate.

Shape legend: B batch, n1 n2 the two axes of a representation (one of them may be a shard), N1 N2 their total sizes, c channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from evodsp.parallel.collectives import DIMENSION, Axis, shard_slice
from evodsp.parallel.exchange import Deferred, Exchange, LocalExchange, Pending, Ready, Shared

SWITCH_BUFFERS = 3
"""Number of shards that a switch needs besides its input: the send buffer, the receive buffer, and the result."""

Mask = Float[Tensor, "B N1 N2"]


@dataclass(frozen=True)
class Pieces:
    """An axis of a tensor in pieces: slices, in order, that cover this rank's `size` entries of it."""

    slices: Sequence[slice]
    dim: int
    size: int

    def __iter__(self) -> Iterator[slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def collect(self, make: Callable[[slice], Any], dim: int | None = None, into: Tensor | None = None) -> Any:
        """Joins the results of `make` for all pieces into one tensor; or into a tuple of tensors, if `make` returns tuples.
        `dim`: the axis along which the pieces lie in the results, if it differs. `into`: tensor to write, which `make` may
        read, because a piece of it is overwritten only when the piece's result is computed.
        """
        if len(self) == 1 and into is None:
            return make(self.slices[0])
        dim = self.dim if dim is None else dim
        wholes = None if into is None else (into,)
        several = False
        for piece in self:
            parts = make(piece)
            several = isinstance(parts, tuple)
            parts = parts if several else (parts,)
            if wholes is None:
                wholes = tuple(part.new_empty(*part.shape[:dim], self.size, *part.shape[dim + 1 :]) for part in parts)
            for whole, part in zip(wholes, parts, strict=True):
                whole[index(dim, piece)] = part
            del parts, part  # freed before the next piece is computed
        assert wholes is not None  # there is at least one piece
        return wholes if several else wholes[0]


@dataclass(frozen=True)
class Budget:
    """The memory for intermediates, which decides into how many pieces a representation is cut."""

    memory: int | None
    """Bytes for the intermediates of a sub-layer; None: there is no limit, and nothing is cut or changed in place."""
    ranks: int
    """Number of ranks that share a representation."""
    samples: int | None = None
    """For planning on meta tensors: compute only this many pieces. The others need the same memory."""
    projects_again: bool = False
    """Whether the backward pass computes the projections of attention again instead of keeping them."""

    @property
    def in_place(self) -> bool:
        """Whether memory is limited. Updates are then written into the representation itself."""
        return self.memory is not None

    def holds(self, needed: int | float) -> bool:
        """Whether `needed` bytes fit into the memory."""
        return self.memory is None or needed <= self.memory

    def pieces(self, x: Float[Tensor, "B n1 n2 _"], dim: int, mask: Mask, width: int) -> Pieces:
        """Pieces of axis `dim` of `x`, so that `width` elements of its dtype for each position fit into the memory. `mask`:
        mask of the whole representation of which `x` is a shard.
        """
        return self.cut(x.shape[dim], dim, mask, width * x.element_size())

    def cut(self, size: int, dim: int, mask: Mask, needed: int) -> Pieces:
        """Pieces of axis `dim`, of which this rank has `size` entries, so that `needed` bytes for each position fit.

        All ranks get the same number of pieces, some of which may be empty.
        """
        most = mask.shape[dim] if size == mask.shape[dim] else mask.shape[dim] // self.ranks
        return Pieces(self.equal(size, mask.numel() * needed / self.ranks, most), dim, size)

    def channels(self, x: Float[Tensor, "B n1 n2 c"], positions: int) -> Pieces:
        """Pieces of the channels of a shard `x`, so that a switch of one of them fits. `positions`: number of positions, B N1
        N2.
        """
        shard = positions * x.shape[-1] * x.element_size() / self.ranks
        return Pieces(self.equal(x.shape[-1], SWITCH_BUFFERS * shard, x.shape[-1]), 3, x.shape[-1])

    def equal(self, size: int, needed: int | float, most: int) -> list[slice]:
        """Split `size` entries that need `needed` bytes into slices that fit: at least one, at most `most`."""
        if self.memory is None:
            return [slice(None)]
        number = max(1, min(math.ceil(needed / self.memory), most))
        return [shard_slice(size, number, piece) for piece in range(number)][: self.samples]


NO_LIMIT = Budget(None, 1)
PROJECTING_AGAIN = Budget(None, 1, projects_again=True)


@dataclass(frozen=True)
class Unmade:
    """A tensor whose rows are computed when they are read: `unmade[at]`."""

    x: Float[Tensor, "B n1 n2 _"]
    """The tensor from which the rows are computed."""
    make: Callable[[Tensor], Tensor]

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        return self.make(self.x[at])


@dataclass(frozen=True)
class Made:
    """An update that is computed already. (It is not the tensor itself: torch.compile takes `pair += tensor` for a sum of two
    tensors.)
    """

    x: Float[Tensor, "B n1 n2 c"]


@dataclass(frozen=True)
class Rows:
    """An update whose rows are computed where they are added."""

    function: Callable[..., Tensor]
    inputs: Sequence[Tensor | Unmade]
    """The arguments of `function`, all cut alike."""
    dim: int
    """The axis along which the independent rows lie."""
    width: int
    """Number of intermediate elements per position."""


@dataclass(frozen=True)
class Added:
    """An update that is computed where it is added, by an operator that adds it, too, after dropout."""

    function: Callable[..., Tensor]
    """(representation, inputs[, mask or keys of dropout, rate, position of the first row and column, sizes of the whole, axis
    along which the mask is constant]) -> its sum with the update."""
    inputs: Sequence[Tensor] = ()
    """Further arguments of `function`, all cut alike, and their independent rows as `Rows` have them."""
    dim: int = 1
    width: int = 0


Update = Made | Rows | Added
"""The result of a sub-layer: a change of a representation. `Rows` do not leave the block that made them."""


@dataclass(frozen=True)
class Dropped:
    """An update under dropout, whose mask is a function of positions in the whole representation."""

    update: Update
    mask: Tensor
    """The mask, or the keys to draw it from."""
    rate: float
    shared_dim: int
    """Axis along which the mask is constant."""
    add: Callable[..., Tensor]
    """The operator `dropout_add`."""


class Sharded:
    """This rank's shard of a representation, and the axis along which it is sharded. The axis of an object never changes."""

    def __init__(
        self,
        x: Float[Tensor, "B n1 n2 c"] | Pending,
        axis: Axis,
        mask: Mask,
        exchange: Exchange,
        budget: Budget | None = None,
    ) -> None:
        """`x`: the shard, or a collective that delivers it. `mask`: of the WHOLE representation, on every rank (it has no
        channels, so it is small); its shape gives the total sizes. `budget`: memory budget, within which the shard itself is
        changed.
        """
        self.pending = Shared(x if isinstance(x, Pending) else Ready(x))
        self.axis, self.mask, self.exchange = axis, mask, exchange
        # This is not the argument's default, because torch 2.11 cannot compile a default that is an object.
        self.budget = NO_LIMIT if budget is None else budget

    @classmethod
    def whole(cls, x: Float[Tensor, "B N1 N2 c"], axis: Axis, mask: Mask) -> Sharded:
        """A representation that this device holds whole."""
        return cls(x, axis, mask, LocalExchange())

    @property
    def x(self) -> Float[Tensor, "B n1 n2 c"]:
        """The shard. Waits for it if a switch is still under way."""
        return self.pending.wait()

    @property
    def own_mask(self) -> Float[Tensor, "B n1 n2"]:
        """This rank's shard of the mask."""
        return self.exchange.shard(self.mask, self.axis)

    @property
    def total_sizes(self) -> tuple[int, int]:
        """Sizes of axes 1 and 2 over all shards."""
        return self.mask.shape[1], self.mask.shape[2]

    @property
    def in_pieces(self) -> bool:
        """Whether updates are computed piece by piece and the shard itself is changed."""
        return self.budget.in_place

    def __iadd__(self, update: Update | Dropped) -> Sharded:
        """The representation plus an update, sharded along the same axis. With a budget the shard itself is changed."""
        x = self.x
        dropped = update if isinstance(update, Dropped) else None
        own = update.update if isinstance(update, Dropped) else update
        if isinstance(own, Added) and not self.in_pieces:
            return self._with(own.function(x, *own.inputs, *self._dropout(dropped)), self.axis)
        if isinstance(own, Made):
            return self._with(x + own.x if dropped is None else self._added(dropped, x, own.x), self.axis)
        for piece in self.budget.pieces(x, own.dim, self.mask, own.width):
            at = index(own.dim, piece)
            inputs = [one[at] for one in own.inputs]
            if isinstance(own, Added):
                x[at] = own.function(x[at], *inputs, *self._dropout(dropped, own.dim, piece.start))
                continue
            part = own.function(*inputs)
            if dropped is None:
                x[at].add_(part)
            else:
                x[at] = self._added(dropped, x[at], part, own.dim, piece.start)
        return self

    def _added(self, dropped: Dropped, x: Tensor, update: Tensor, dim: int = 1, offset: int = 0) -> Tensor:
        """x plus an update after dropout. `dim`, `offset`: as in `_first`."""
        return dropped.add(x, update, *self._dropout(dropped, dim, offset))

    def _dropout(self, dropped: Dropped | None, dim: int = 1, offset: int = 0) -> tuple[Any, ...]:
        """The arguments of dropout of an operator that adds an update."""
        if dropped is None:
            return ()
        return dropped.mask, dropped.rate, self._first(dim, offset), self.total_sizes, dropped.shared_dim

    def update(self, function: Callable[..., Tensor], *inputs: Tensor | Unmade, width: int, dim: int = 1) -> Update:
        """The update that `function` computes from `inputs`: now, or with a budget a few rows at a time while it is added.
        `dim`: the axis along which the rows lie, in all inputs and in the representation that is changed. `width`: number of
        intermediate elements per position of that representation.
        """
        return Rows(function, inputs, dim, width) if self.in_pieces else Made(function(*inputs))

    def collect(
        self, function: Callable[..., Any], *inputs: Tensor, width: int, dim: int = 1, result_dim: int | None = None
    ) -> Any:
        """The whole result of `function` for `inputs`: a tensor or a tuple of them. With a budget, a few rows are computed at
        a time. `dim`: the axis along which the rows lie in the inputs and in this representation. `result_dim`: the axis
        along which they lie in the results, if it differs. `width`: number of intermediate elements per position of this
        representation.
        """
        if not self.in_pieces:
            return function(*inputs)
        pieces = self.budget.pieces(self.x, dim, self.mask, width)

        def make(piece: slice) -> Any:
            return function(*(one[index(dim, piece)] for one in inputs))

        return pieces.collect(make, result_dim)

    def by_channels(self, start: Callable[[Sharded, slice], Pending], channels: int, width: int) -> Pending:
        """A result [B n1 n2 channels] whose channels are independent; `start` delivers some of the `channels`. With a budget,
        a few channels are computed at a time, and `start` gets half of the budget for its intermediates. `width`: number of
        intermediate elements per position and channel.
        """
        if not self.in_pieces:
            return start(self, slice(None))
        memory, ranks = self.budget.memory or 0, self.budget.ranks
        half = replace(self.budget, memory=max(1, memory // 2))
        own = Sharded(self.x, self.axis, self.mask, self.exchange, half)
        needed = width * channels * self.mask.numel() * self.x.element_size() / ranks
        most = max(1, channels // ranks)  # a piece has a channel for each rank; otherwise some ranks would be idle
        pieces = Pieces(half.equal(channels, needed, most), 3, channels)
        return Ready(pieces.collect(lambda some: start(own, some).wait()))

    def switch(self, axis: Axis) -> Sharded:
        """The same representation sharded along `axis`: an all-to-all, or nothing if it is sharded so already.

        The all-to-all is launched here and awaited where the result's `x` is first read, so computation in between hides it.

        With a budget that does not hold what is sent and received, the shard itself is changed, a few channels at a time and
        when the result's `x` is first read: `x` of this object must not be read after that.
        """
        if axis == self.axis:
            return self
        total = self.total_sizes[DIMENSION[self.axis] - 1]
        if self.switches_in_place:
            channels = self._channels_to_switch()
            change = partial(self.exchange.switch_in_place, self.x, self.axis, axis, total, channels)
            return self._with(Deferred(change), axis)
        return self._with(self.exchange.start_switch(self.x, self.axis, axis, total), axis)

    def taken(self) -> Sharded:
        """The same representation, which this object gives away. A function that changes its argument begins with this;
        otherwise its caller would keep the memory of what is no longer needed.
        """
        given = self._with(self.pending, self.axis)
        del self.pending
        return given

    @property
    def switches_in_place(self) -> bool:
        """Whether `switch` overwrites the shard."""
        # An in-place switch needs shards that are equally large along both axes.
        return self.mask.shape[1] == self.mask.shape[2] and len(self._channels_to_switch()) > 1

    def _channels_to_switch(self) -> Sequence[slice]:
        """Slices of the channels; each is switched by itself."""
        return self.budget.channels(self.x, self.mask.numel()).slices

    def _first(self, dim: int = 1, offset: int = 0) -> tuple[int, int]:
        """Position in the whole representation of the first row and column of this shard, or of its piece that starts at
        `offset` of axis `dim`.
        """
        own = DIMENSION[self.axis]
        begin = self.exchange.owned(self.total_sizes[own - 1]).start
        first, second = ((begin if axis == own else 0) + (offset if axis == dim else 0) for axis in (1, 2))
        return first, second

    def _with(self, x: Float[Tensor, "B n1 n2 c"] | Pending, axis: Axis) -> Sharded:
        return Sharded(x, axis, self.mask, self.exchange, self.budget)


def index(dim: int, piece: slice) -> tuple[slice, ...]:
    """The index of a piece of axis `dim`."""
    return (slice(None),) * dim + (piece,)
