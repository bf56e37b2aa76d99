"""The exchange, through which a module gets the data that other ranks hold of a representation.

A module of the model is written for one device. Where it needs data from other shards it calls its `Exchange`, with the NAME
of an axis (`collectives.DIMENSION` gives the dimension). `ShardedExchange` runs collectives. `LocalExchange` is for one device
and returns its input. Model code therefore has no `if world_size > 1`.

Each method has two forms. `switch` returns the result; `start_switch` returns a `Pending` whose `wait()` returns it, so that
computation in between hides the communication. `whole` is the size of the axis over all shards.

A `Pending` is a collective in the autograd graph, launched and awaited apart:

    pending = start(x, Switch(...))      # communication begins
    ...                                  # compute something else
    y = pending.wait()                   # its result

A collective that is launched early in the forward pass has a transpose that is launched early in the backward pass: it is
launched where the forward result was awaited, and awaited where the forward collective was launched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.collectives import (
    DIMENSION,
    Axis,
    Broadcast,
    Collective,
    Gather,
    ScatterSum,
    Sum,
    Switch,
    Transfer,
    maximum,
    shard_sizes,
    shard_slice,
)
from evodsp.parallel.group import Entry, Group, Kind, Ledger


class Pending(ABC):
    """A tensor that may still be on its way."""

    @abstractmethod
    def wait(self, keep: bool = False) -> Tensor:
        """Wait for the tensor and return it. `keep`: pass True if a recomputation will call `wait` again; otherwise call it
        only once.
        """


class Ready(Pending):
    """A tensor that is available already."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self, keep: bool = False) -> Tensor:
        return self.x


class Deferred(Pending):
    """A tensor that is computed when it is awaited."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def wait(self, keep: bool = False) -> Tensor:
        return self._make()


class Shared(Pending):
    """A pending tensor with several readers. The first reader waits; the others get the same tensor."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self._x: Tensor | None = None

    def wait(self, keep: bool = False) -> Tensor:
        if self._pending is not None:
            self._x, self._pending = self._pending.wait(keep), None
        assert self._x is not None
        return self._x


class Launched(Pending):
    """The result of a running collective, as part of the autograd graph.

    From launch to wait the graph carries only a token: a buffer that is still being filled must not be touched, and
    autograd would check it or add to it. The tensors are in `_Link`, which both graph nodes hold.
    """

    def __init__(self, x: Tensor, collective: Collective) -> None:
        self._link = _Link(collective)
        self._token: Tensor = _Launch.apply(x, self._link)

    def wait(self, keep: bool = False) -> Tensor:
        return _Wait.apply(self._token, self._link, keep)


@dataclass
class _Link:
    """The state of one collective and its transpose, shared by the two nodes of the graph."""

    collective: Collective
    sending: Transfer | None = None
    returning: Transfer | None = None
    kept: Tensor | None = None
    """The result, if it must be kept for a recomputation."""


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        link.sending = link.collective.launch(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        transfer, ctx.link.returning = ctx.link.returning, None
        return transfer.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, link: _Link, keep: bool) -> Tensor:
        ctx.link = link
        transfer, link.sending = link.sending, None  # the send buffer is freed with it
        result = link.kept if transfer is None else transfer.wait()
        if result is None:
            raise RuntimeError("wait() was called twice on one collective; call wait(keep=True) the first time")
        link.kept = result if keep else None
        return result.detach()  # a new tensor object, because autograd marks it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.link.returning = ctx.link.collective.transpose().launch(gradient, backward=True)
        return gradient.new_zeros(()), None, None


class Traced(Pending):
    """A running collective within a torch.compile graph, where it must be an operator.

    Autograd again gets a token instead of the buffer. Its gradient, in the backward pass, IS the buffer that the transpose
    receives, and so the token has that buffer's shape. Nothing but the wait reads it.
    """

    def __init__(self, x: Tensor, collective: Collective) -> None:
        self._collective, self._shape = collective, tuple(x.shape)
        self._received = collective.traced(x.detach())
        self._token: Tensor = _Depart.apply(x, collective)

    def wait(self, keep: bool = False) -> Tensor:
        return _Arrive.apply(self._token, self._received, self._collective, self._shape)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective) -> Tensor:
        ctx.transpose, ctx.shape = collective.transpose(), collective.result_shape(x.shape)
        return x.new_zeros(()).expand(ctx.transpose.buffer_shape(ctx.shape))

    @staticmethod
    def backward(ctx: Any, received: Tensor) -> tuple[Tensor, None]:
        return ctx.transpose.arrived(_wait_tensor(received), ctx.shape), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, received: Tensor, collective: Collective, shape: tuple[int, ...]) -> Tensor:
        ctx.transpose = collective.transpose()
        return collective.arrived(_wait_tensor(received), shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose.traced(gradient), None, None, None


_wait_tensor = torch.ops._c10d_functional.wait_tensor


def start(x: Tensor, collective: Collective) -> Pending:
    """Launch `collective` on `x`; `.wait()` gives its result."""
    return Traced(x, collective) if torch.compiler.is_compiling() else Launched(x, collective)


class Exchange(ABC):
    """Linear maps between shards. The backward pass of each is its exact transpose."""

    @abstractmethod
    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        """All-to-all: from a sharding along `from_axis` (of size `whole`) to one along `to_axis`."""

    @abstractmethod
    def switch_in_place(
        self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int, channels: Sequence[slice]
    ) -> Tensor:
        """`switch` into the memory of `x`, without gradient. The two axes are equally long, and so are their shards on a rank.

        `channels`: slices of the last axis, which are switched one after another. Only the send and receive buffers of one
        slice need further memory. Other references to the memory of `x` see the switched values afterwards.
        """

    @abstractmethod
    def start_gather(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        """All-gather: every rank gets the whole of `x`, which is sharded along `axis` (of size `whole`)."""

    @abstractmethod
    def start_sum(self, x: Tensor) -> Pending:
        """All-reduce: every rank gets the sum of `x` over ranks."""

    @abstractmethod
    def start_broadcast(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        """One shard of an all-gather: every rank gets the shard of rank `root` along `axis`."""

    @abstractmethod
    def start_scatter_sum(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        """Reduce-scatter: `x` is every rank's partial sum, whole along `axis`; every rank gets its shard of their sum."""

    @abstractmethod
    def collect(self, x: Tensor, axis: Axis, whole: int) -> Tensor | None:
        """The whole of `x`, which is sharded along `axis` (of size `whole`), on the first rank; None on the others, which
        receive nothing. It carries no gradient. `axis` must not be the last one."""

    @abstractmethod
    def of_first(self, x: Tensor) -> Tensor:
        """The `x` of the first rank, without gradient and in its own precision. All ranks have one of the same shape."""

    @abstractmethod
    def shards(self, whole: int) -> list[slice]:
        """The slice of every shard, by rank, of an axis of size `whole`."""

    @abstractmethod
    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks, without gradient (used to stabilise a softmax)."""

    @abstractmethod
    def softmax_sums(self, sums: Tensor) -> Tensor:
        """Sums over all ranks of 2^logit x value, up to one common factor for each row.

        `sums` [..., c + 1]: this rank's sums of 2^(logit - shift) x value, then the shift, which carries no gradient. Quotients
        of the result, [..., c], do not depend on any shift.
        """

    def keeping(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for a computation and for its recomputation (`context_fn` of torch's checkpoint).

        Results of gathers and sums in the first are reused in the second, without communication.
        """
        return nullcontext(), nullcontext()

    def recording(self) -> AbstractContextManager[list[Entry]]:
        """A context whose collectives are not entered in the ledger but in the list that it gives."""
        return nullcontext([])

    repeats = 0
    """Number of collectives that were `repeated`."""

    def repeated(self, entries: Sequence[Entry]) -> None:
        """Count collectives that were launched again without the exchange, by a recording (`evodsp.model.recordings`)."""
        self.repeats += len(entries)

    @property
    def backend(self) -> str:
        """torch's name of what communicates; '' where nothing does."""
        return ""

    @abstractmethod
    def owned(self, whole: int) -> slice:
        """This rank's slice of an axis of size `whole`."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Number of ranks. A loss term computed from this rank's shard is multiplied by it, because the mean of the ranks'
        losses is the loss.
        """

    def shard(self, x: Tensor, axis: Axis) -> Tensor:
        """This rank's shard of a tensor that every rank holds whole. The transpose pads with zeros, without communication."""
        return x[(slice(None),) * DIMENSION[axis] + (self.owned(x.shape[DIMENSION[axis]]),)]

    def switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Tensor:
        return self.start_switch(x, from_axis, to_axis, whole).wait()

    def gather(self, x: Tensor, axis: Axis, whole: int) -> Tensor:
        return self.start_gather(x, axis, whole).wait()

    def sum(self, x: Tensor) -> Tensor:
        return self.start_sum(x).wait()


class LocalExchange(Exchange):
    """The exchange of one device, which holds whole representations: every method returns its input."""

    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        return Ready(x)

    def switch_in_place(
        self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int, channels: Sequence[slice]
    ) -> Tensor:
        return x

    def start_gather(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        return Ready(x)

    def start_sum(self, x: Tensor) -> Pending:
        return Ready(x)

    def start_broadcast(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        return Ready(x)

    def start_scatter_sum(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        return Ready(x)

    def collect(self, x: Tensor, axis: Axis, whole: int) -> Tensor | None:
        return x.detach()

    def of_first(self, x: Tensor) -> Tensor:
        return x.detach()

    def shards(self, whole: int) -> list[slice]:
        return [slice(0, whole)]

    def max(self, x: Tensor) -> Tensor:
        return x.detach()

    def softmax_sums(self, sums: Tensor) -> Tensor:
        return sums[..., :-1]

    def owned(self, whole: int) -> slice:
        return slice(0, whole)

    @property
    def ranks(self) -> int:
        return 1


class ShardedExchange(Exchange):
    """The exchange of one rank of a group.

    `overlap`: False waits for each collective where it is launched, for measurements and debugging. `dtype`: precision in
    which tensors are communicated and reduced; None: the tensor's own.
    """

    def __init__(self, group: Group, overlap: bool = True, dtype: torch.dtype | None = None) -> None:
        self.group, self.overlap, self.dtype = group, overlap, dtype
        self._tape: _Tape | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedExchange:
        """Copies of a model share the exchange: a process group cannot be copied."""
        return self

    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        source, target = DIMENSION[from_axis], DIMENSION[to_axis]
        size = self.group.size
        return self._start(
            x, Switch(self.group, source, target, shard_sizes(whole, size), shard_sizes(x.shape[target], size))
        )

    def switch_in_place(
        self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int, channels: Sequence[slice]
    ) -> Tensor:
        # A rank's shards along two equally long axes have the same size, and a channel has the same addresses in both. So a
        # channel can be overwritten once it has been sent.
        source, target = DIMENSION[from_axis], DIMENSION[to_axis]
        if x.shape[target] != whole:
            raise ValueError(f"axis {target} of {tuple(x.shape)} is not as long as the sharded one, {whole}")
        x = x.contiguous()
        result = x.view(x.transpose(source, target).shape)
        for piece in channels:
            result[..., piece] = self.switch(x[..., piece], from_axis, to_axis, whole)
        return result

    def start_gather(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        return self._start(x, Gather(self.group, DIMENSION[axis], shard_sizes(whole, self.group.size)))

    def start_sum(self, x: Tensor) -> Pending:
        return self._start(x, Sum(self.group))

    def start_broadcast(self, x: Tensor, axis: Axis, root: int, whole: int) -> Pending:
        return self._start(x, Broadcast(self.group, root, DIMENSION[axis], shard_sizes(whole, self.group.size)))

    def start_scatter_sum(self, x: Tensor, axis: Axis, whole: int) -> Pending:
        return self._start(x, ScatterSum(self.group, DIMENSION[axis], shard_sizes(whole, self.group.size)))

    def collect(self, x: Tensor, axis: Axis, whole: int) -> Tensor | None:
        # This is a switch to the last axis, of which the first rank's shard is everything.
        size, last = self.group.size, x.ndim - 1
        all_on_first = (x.shape[last], *[0] * (size - 1))
        switch = Switch(self.group, DIMENSION[axis], last, shard_sizes(whole, size), all_on_first)
        found = self._start(x.detach(), switch).wait()
        return found if self.group.rank == 0 else None

    def of_first(self, x: Tensor) -> Tensor:
        shards = Broadcast(self.group, 0, 0, (1,) * self.group.size)
        return self._start(x.detach().unsqueeze(0), shards, exact=True).wait()[0]

    def shards(self, whole: int) -> list[slice]:
        return [shard_slice(whole, self.group.size, rank) for rank in range(self.group.size)]

    def max(self, x: Tensor) -> Tensor:
        if self._tape is not None and self._tape.replaying:
            return self._tape.next()
        total = maximum(x, self.group)
        if self._tape is not None:
            self._tape.results.append(total)
        return total

    def softmax_sums(self, sums: Tensor) -> Tensor:
        # One all-gather replaces an all-reduce of the shift and one of the sums, because latency dominates for small tensors.
        # It is not rounded on the wire, because the shift that is sent must be the one that was used.
        gather = Gather(self.group, 0, (1,) * self.group.size)
        return added_softmax_sums(self._start(sums.unsqueeze(0), gather, exact=True).wait())

    @contextmanager
    def recording(self) -> Iterator[list[Entry]]:
        ledger, before = Ledger(), self.group.ledger
        self.group.ledger = ledger
        try:
            yield ledger.entries
        finally:
            self.group.ledger = before

    def repeated(self, entries: Sequence[Entry]) -> None:
        super().repeated(entries)
        if self.group.ledger is not None:
            self.group.ledger.entries += entries

    @property
    def backend(self) -> str:
        return str(dist.get_backend(self.group.handle))

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

    def _start(self, x: Tensor, collective: Collective, exact: bool = False) -> Pending:
        """`exact`: communicate in the precision of `x` instead of `dtype`."""
        keeps = self._tape is not None and collective.kind in KEPT
        if self._tape is None or not keeps:
            return self._launched(x, collective, exact)
        if self._tape.replaying:
            return Ready(self._tape.next().requires_grad_(x.requires_grad))
        self._tape.results.append(None)
        return _Recorded(self._launched(x, collective, exact), self._tape.results, len(self._tape.results) - 1)

    def _launched(self, x: Tensor, collective: Collective, exact: bool) -> Pending:
        pending = start(x, collective) if exact or self.dtype is None else _Cast(x, collective, self.dtype)
        return pending if self.overlap else Ready(pending.wait())


def added_softmax_sums(every: Tensor) -> Tensor:
    """The result of `Exchange.softmax_sums`, from the sums of all ranks [ranks, ..., c + 1]."""
    sums, shifts = every[..., :-1], every[..., -1:].detach()
    return (sums * (shifts - shifts.amax(0)).exp2()).sum(0)


KEPT: tuple[Kind, ...] = ("all-gather", "all-reduce")
"""Collectives whose results `keeping` keeps: they are small (biases, one operand, sums). A switch's result is as large as the
activations that are recomputed, so it is communicated again."""


@dataclass
class _Tape:
    """Results of collectives in launch order: recorded by a computation, replayed by its recomputation."""

    results: list[Tensor | None]
    replaying: bool
    position: int = 0

    def next(self) -> Tensor:
        """The next result, as a leaf of the recomputation's graph."""
        result = self.results[self.position]
        self.position += 1
        if result is None:
            raise RuntimeError("a collective was launched but not awaited before the recomputation")
        return result.detach()


class _Recorded(Pending):
    """A collective whose result is recorded on the tape when it has arrived."""

    def __init__(self, pending: Pending, results: list[Tensor | None], position: int) -> None:
        self._pending, self._results, self._position = pending, results, position

    def wait(self, keep: bool = False) -> Tensor:
        result = self._pending.wait(keep)
        self._results[self._position] = result.detach()
        return result


class _Cast(Pending):
    """A collective that communicates in another precision, in the forward and in the backward pass."""

    def __init__(self, x: Tensor, collective: Collective, dtype: torch.dtype) -> None:
        self._pending, self._dtype = start(x.to(dtype), collective), x.dtype

    def wait(self, keep: bool = False) -> Tensor:
        return self._pending.wait(keep).to(self._dtype)
