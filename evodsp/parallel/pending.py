"""Collectives in the autograd graph, launched and awaited apart so that computation can lie between the two.

    pending = start(x, Switch(...))      # communication begins
    ...                                  # compute something else
    y = pending.wait()                   # its result

A collective that is launched early in the forward pass has a transpose that is launched early in the backward pass: it is
launched where the forward result was awaited, and awaited where the forward collective was launched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evodsp.parallel.collectives import Collective, Transfer


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
