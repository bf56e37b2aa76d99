"""A rank's place in a group without processes: it communicates nothing, and says what it would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evodsp.parallel.group import Place
from evodsp.parallel.ledger import Kind, Ledger


@dataclass(frozen=True)
class Begun:
    """A collective that begins."""

    kind: Kind
    bytes: int
    """As the ledger counts them."""


class Arrival:
    """What a caller waits for."""

    def __init__(self, number: int, waited: Callable[[int], None]) -> None:
        self._number, self._waited = number, waited

    def wait(self) -> None:
        self._waited(self._number)


class ImaginedGroup(Place):
    """Rank `rank` of `size`, for tensors without numbers. The exchange and the collectives that use it are the real ones."""

    def __init__(
        self,
        rank: int,
        size: int,
        began: Callable[[Begun], int],
        waited: Callable[[int], None],
        ledger: Ledger | None = None,
    ) -> None:
        """`began` is told of each collective and numbers it; `waited` is told when its result is awaited."""
        super().__init__(rank, size, ledger)
        self._began, self._waited = began, waited

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Any:
        return self._begin("all-to-all", sent)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return self._begin("all-gather", received)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> Any:
        return self._begin("reduce-scatter", sent)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        return self._begin("all-reduce", x, times=2)

    def broadcast(self, x: Tensor, root: int) -> Any:
        return self._begin("broadcast", x)

    def reduce(self, x: Tensor, root: int) -> Any:
        return self._begin("reduce", x)

    def begin(self, what: Begun) -> Arrival:
        """Tell of a collective."""
        return Arrival(self._began(what), self._waited)

    def _begin(self, kind: Kind, buffer: Tensor, times: int = 1) -> Arrival:
        return self.begin(Begun(kind, times * buffer.numel() * buffer.element_size()))
