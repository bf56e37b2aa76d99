"""A representation of which every rank of a group holds one shard.

A block of the Evoformer is written with two verbs: `add` the update of a sub-layer, and `switch` the sharded axis where the
next sub-layer needs another one. On one device `switch` does nothing. Without gradients, and with a memory budget, `add` writes
into the representation and computes the update piece by piece (`evodsp.model.in_place`).

Shape legend: B batch, n1 n2 the two axes of a representation (one of them may be a shard), N1 N2 their total sizes, c channels.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.dropout import Dropout, Masks
from evodsp.model.in_place import Budget, add_in_place
from evodsp.parallel.exchange import Exchange
from evodsp.parallel.layout import DIMENSION, Axis
from evodsp.parallel.pending import Pending, Ready, Shared


class Sharded:
    """This rank's shard of a representation, and the axis along which the representation is sharded. Never changes."""

    def __init__(
        self,
        x: Float[Tensor, "B n1 n2 c"] | Pending,
        axis: Axis,
        mask: Float[Tensor, "B N1 N2"],
        exchange: Exchange,
        budget: Budget | None = None,
    ) -> None:
        """`x`: the shard, or a collective that delivers it. `mask`: of the WHOLE representation, on every rank (it has no
        channels, so it is small); its shape gives the total sizes. `budget`: change the shard itself, within this
        budget.
        """
        self.pending = Shared(x if isinstance(x, Pending) else Ready(x))
        self.axis, self.mask, self.exchange, self.budget = axis, mask, exchange, budget

    @property
    def x(self) -> Float[Tensor, "B n1 n2 c"]:
        """The shard. Waits for it if a switch is still under way."""
        return self.pending.wait()

    @property
    def total_sizes(self) -> tuple[int, int]:
        """Sizes of axes 1 and 2 over all shards."""
        return self.mask.shape[1], self.mask.shape[2]

    def switch(self, axis: Axis) -> Sharded:
        """The same representation sharded along `axis`: an all-to-all, or nothing if it is sharded so already.

        The all-to-all is launched here and awaited where the result's `x` is first read, so computation in between hides it.
        """
        if axis == self.axis:
            return self
        total = self.total_sizes[DIMENSION[self.axis] - 1]
        return self._with(self.exchange.start_switch(self.x, self.axis, axis, total), axis)

    def add(self, layer: nn.Module, *arguments: Any, dropout: Dropout | None = None, masks: Masks = None) -> Sharded:
        """The representation plus the update `layer(*arguments)`, sharded along the same axis.

        `masks`: of `dropout`. With a budget, and without dropout, the shard itself is changed.
        """
        if self.budget is not None and masks is None:
            add_in_place(layer, self.pending, self.mask, self.budget, *arguments)
            return self
        update = layer(*arguments)
        x = self.x + update if dropout is None else dropout(self.x, update, masks, self.total_sizes, self.axis)
        return self._with(x, self.axis)

    def _with(self, x: Float[Tensor, "B n1 n2 c"] | Pending, axis: Axis) -> Sharded:
        return Sharded(x, axis, self.mask, self.exchange, self.budget)
