"""A representation of which every rank of a group holds one shard.

A block of the Evoformer is written with two verbs: `add` the update of a sub-layer, and `switch` the sharded axis where the
next sub-layer needs another one. On one device `switch` does nothing. Without gradients, and with a memory budget, both write
into the representation, piece by piece: `add` as `evodsp.model.in_place` says, `switch` a few channels at a time.

Shape legend: B batch, n1 n2 the two axes of a representation (one of them may be a shard), N1 N2 their total sizes, c channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.dropout import Dropout, Masks
from evodsp.model.in_place import Budget, add_in_place
from evodsp.parallel.exchange import Exchange
from evodsp.parallel.layout import DIMENSION, Axis
from evodsp.parallel.pending import Deferred, Pending, Ready, Shared


class Sharded:
    """This rank's shard of a representation, and the axis along which it is sharded. The axis of an object never changes."""

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

    @property
    def switches_in_place(self) -> bool:
        """Whether `switch` changes the shard itself."""
        # An in-place switch needs shards that are equally large along both axes.
        return self.mask.shape[1] == self.mask.shape[2] and len(self._channels_to_switch()) > 1

    def _channels_to_switch(self) -> list[slice]:
        """The channels that are switched at a time."""
        return [slice(None)] if self.budget is None else self.budget.channels(self.x, self.mask.numel())

    def _with(self, x: Float[Tensor, "B n1 n2 c"] | Pending, axis: Axis) -> Sharded:
        return Sharded(x, axis, self.mask, self.exchange, self.budget)
