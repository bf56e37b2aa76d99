"""Blocks whose sub-layers run as the schedule's table says, wherever their representations lie.

Shape legend: B batch, n1 n2 the two sharded-or-whole axes of a representation, c channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.primitives import Dropout, ShardedModule
from evodsp.model.schedule import Step
from evodsp.parallel.exchange import Exchange
from evodsp.parallel.layout import DIMENSION, Axis
from evodsp.parallel.pending import Pending, Ready, Shared
from evodsp.rng import Draws


class Sharded:
    """A representation on its way through a block: this rank's shard of it, and along which axis it is cut."""

    def __init__(
        self, x: Float[Tensor, "B n1 n2 c"], axis: Axis, mask: Float[Tensor, "B whole1 whole2"], exchange: Exchange
    ) -> None:
        """`mask`: of the WHOLE representation (it is small: no channels); its shape is the true size."""
        self.x, self.axis, self.mask, self.exchange = x, axis, mask, exchange

    @property
    def whole(self) -> tuple[int, int]:
        """True sizes of axes 1 and 2 over all shards."""
        return self.mask.shape[1], self.mask.shape[2]

    def start(self, axis: Axis) -> Pending:
        """The representation on its way to be cut along `axis`."""
        if axis == self.axis:
            return Ready(self.x)
        return self.exchange.start_switch(self.x, self.axis, axis, self.whole[DIMENSION[self.axis] - 1])

    def on(self, axis: Axis) -> Tensor:
        """The representation cut along `axis`, where it stays."""
        self.x, self.axis = self.start(axis).wait(), axis
        return self.x


class Block(ShardedModule):
    """A module whose sub-layers are residual updates run by a table."""

    def __init__(self, steps: Sequence[Step], msa_dropout: float, pair_dropout: float) -> None:
        super().__init__()
        self.steps = tuple(steps)
        rates = {"msa": msa_dropout, "pair": pair_dropout}
        self.dropouts = torch.nn.ModuleDict(
            {step.layer: Dropout(rates[step.updates], step.shared) for step in steps if step.shared is not None}
        )

    def run(self, draws: Sequence[Draws], **representations: Sharded) -> None:
        """Update the representations, `msa` and `pair`, step by step. `draws`: one stream of dropout per sample, or none."""
        for step in self.plan.pair_steps(self.steps):
            inputs = [representations[name].on(axis) for name, axis in step.reads]
            if step.masked:
                inputs.append(representations[step.reads[0][0]].mask)
            target = representations[step.updates]
            moved = Shared(target.start(step.lands))  # launched before the layer computes
            update = self.get_submodule(step.layer)(*inputs, *([moved] if step.result is not None else []))
            if step.layer in self.dropouts:
                own = [d.at(step.layer) for d in draws]
                update = self.dropouts[step.layer](update, own, target.whole, step.lands)
            target.x, target.axis = moved.wait() + update, step.lands
            del inputs, moved, update  # or they would live on through the next sub-layer
