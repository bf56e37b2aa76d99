"""What a module asks of the other shards of a representation.

A module of the model is written for one device. Where it needs something that other shards hold it asks its `Exchange`, by
the NAME of the axis. `LocalExchange` is the exchange of one device: every answer is the identity. The sharded one does the
collectives. Model code therefore has no `if world_size > 1`.

Tensors have the shape of a representation, `[batch, axis 1, axis 2, channels]`: the MSA is `[B, seq, res, c]`, the pair
`[B, i, j, c]`. `DIMENSION` says where each named axis stands.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

Axis = Literal["seq", "res", "i", "j", "channel"]

DIMENSION: dict[Axis, int] = {"seq": 1, "res": 2, "i": 1, "j": 2, "channel": 3}


@runtime_checkable
class Exchange(Protocol):
    """The linear maps between shards. Each one's backward is its exact transpose."""

    def switch(self, x: Tensor, from_axis: Axis, to_axis: Axis) -> Tensor:
        """All-to-all: `x` sharded along `from_axis` comes back sharded along `to_axis`."""
        ...

    def gather(self, x: Tensor, axis: Axis) -> Tensor:
        """All-gather: `x` sharded along `axis` comes back whole."""
        ...

    def scatter_sum(self, x: Tensor, axis: Axis) -> Tensor:
        """Reduce-scatter: partial sums, whole along `axis`, are added over ranks; each rank keeps its shard of `axis`."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: partial sums are added over ranks; every rank has the total."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks, detached from the graph (it only stabilises a softmax)."""
        ...

    def shard(self, x: Tensor, axis: Axis) -> Tensor:
        """This rank's shard of a tensor that every rank holds whole."""
        ...


class LocalExchange:
    """The exchange of one device: the whole representation is here, so every answer is what was given."""

    def switch(self, x: Tensor, from_axis: Axis, to_axis: Axis) -> Tensor:
        return x

    def gather(self, x: Tensor, axis: Axis) -> Tensor:
        return x

    def scatter_sum(self, x: Tensor, axis: Axis) -> Tensor:
        return x

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x.detach()

    def shard(self, x: Tensor, axis: Axis) -> Tensor:
        return x
