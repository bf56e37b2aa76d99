"""Names of the axes of a representation, and how an axis is divided into shards.

A representation is `[batch, axis 1, axis 2, channels]`: the MSA `[B, seq, res, c]`, the pair `[B, i, j, c]`. Shards have the
sizes that `torch.tensor_split` gives: the first `whole mod ranks` shards have one entry more. A shard may be empty.
"""

from __future__ import annotations

from typing import Literal

Axis = Literal["seq", "res", "i", "j", "channel"]

DIMENSION: dict[Axis, int] = {"seq": 1, "res": 2, "i": 1, "j": 2, "channel": 3}
"""Dimension of each axis."""


def shard_sizes(whole: int, ranks: int) -> tuple[int, ...]:
    """Size of each rank's shard of an axis of size `whole`."""
    least, more = divmod(whole, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def shard_slice(whole: int, ranks: int, rank: int) -> slice:
    """The part of an axis of size `whole` that `rank` holds."""
    least, more = divmod(whole, ranks)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))
