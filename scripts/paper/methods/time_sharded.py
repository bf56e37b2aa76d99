"""What embedded sequence parallelism has in common: the tokens are sharded along time through all layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from evodsp.parallel.collectives import Gather, shard, shard_sizes
from evodsp.parallel.exchange import start
from evodsp.rng import Draws

from ..transformer import positions_of
from .base import Method, Parallel, must_divide

TIME = 1
"""The sharded dimension of the tokens [B, T, S, C]."""


class TimeSharded(Parallel):
    """Splits the tokens along time before the layers, and gathers them after the layers."""

    def run(self, latents: Tensor, draws: Draws | None) -> Tensor:
        tokens, group = self.model.embed(latents), self.groups.ends
        whole = shard_sizes(tokens.shape[TIME], group.size)
        positions = shard(positions_of(tokens), TIME, group)
        tokens = shard(tokens, TIME, group).clone()  # a view would keep all tokens
        tokens = self.model.transform(tokens, positions, draws)
        return self.model.unembed(start(tokens, Gather(group, TIME, whole)).wait(), latents.shape)


class EmbeddedMethod(Method):
    """A method that shards along time only. As in the official implementations, all shards have one size."""

    def check_sizes(self, sizes: Sequence[int], ranks: int) -> None:
        must_divide(ranks, sizes[0], "the number of time steps", self.name)
