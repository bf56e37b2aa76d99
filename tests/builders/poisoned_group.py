"""A transport that shows what is read too early or changed too early, which gloo often delivers in time by luck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evodsp.parallel.group import Group


@dataclass
class _Flight:
    """A communication under way, into a buffer that nobody else has seen."""

    work: Any
    real: Tensor
    received: Tensor | None
    """Where the numbers go when they are awaited; None where the transport leaves them undefined."""
    sent: Tensor | None
    before: Tensor | None
    """The send buffer, and what it held at the launch."""

    def wait(self) -> None:
        self.work.wait()
        if self.sent is not None and self.before is not None:
            assert torch.equal(self.before.nan_to_num(), self.sent.nan_to_num()), "a send buffer has changed in flight"
        if self.received is not None:
            self.received.data.copy_(self.real)


class PoisonedGroup(Group):
    """Receive buffers are full of NaN until they are awaited, and send buffers must be the same then as at the launch."""

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Any:
        launch = super().all_to_all
        return self._launched(lambda r, s: launch(r, s, arriving, leaving), received, sent)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return self._launched(super().all_gather, received, sent)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> Any:
        return self._launched(super().reduce_scatter, received, sent)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        launch = super().all_reduce
        return self._in_place(lambda real: launch(real, maximum), x, x)

    def broadcast(self, x: Tensor, root: int) -> Any:
        launch = super().broadcast
        if self.rank == root:
            return _Flight(launch(x, root), x, None, x, x.clone())
        return self._in_place(lambda real: launch(real, root), x, x)

    def reduce(self, x: Tensor, root: int) -> Any:
        launch = super().reduce
        return self._in_place(lambda real: launch(real, root), x, x if self.rank == root else None)

    def _launched(self, launch: Callable[[Tensor, Tensor], Any], received: Tensor, sent: Tensor) -> _Flight:
        real = torch.empty_like(received)
        flight = _Flight(launch(real, sent), real, received, sent, sent.detach().clone())
        _poison(received)
        return flight

    def _in_place(self, launch: Callable[[Tensor], Any], x: Tensor, received: Tensor | None) -> _Flight:
        real = x.detach().clone()
        flight = _Flight(launch(real), real, received, None, None)
        _poison(x)
        return flight


def _poison(x: Tensor) -> None:
    if x.is_floating_point():
        x.data.fill_(torch.nan)
