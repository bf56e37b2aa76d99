"""Where the named axes of a representation stand, and how an axis is cut into shards.

A representation is `[batch, axis 1, axis 2, channels]`: the MSA `[B, seq, res, c]`, the pair `[B, i, j, c]`. Shards have the
sizes of `torch.tensor_split`: the first `whole mod ranks` of them hold one more. A shard may be empty.
"""

from __future__ import annotations

from typing import Literal

Axis = Literal["seq", "res", "i", "j", "channel"]

DIMENSION: dict[Axis, int] = {"seq": 1, "res": 2, "i": 1, "j": 2, "channel": 3}
"""Where each axis stands in a representation."""


def shard_sizes(whole: int, ranks: int) -> tuple[int, ...]:
    """Sizes of the shards of an axis of `whole` entries."""
    least, more = divmod(whole, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def shard_slice(whole: int, ranks: int, rank: int) -> slice:
    """The entries of an axis that `rank` holds."""
    least, more = divmod(whole, ranks)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))
