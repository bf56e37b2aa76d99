"""The random numbers of MSA features on a device: those of `evodsp.data.features.CycleDraws`, for all iterations at once.

Shapes: C recycling iterations, N sequences.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from evodsp.rng import key_words, philox4x32

_LAST = torch.iinfo(torch.int64).max


def words(keys: Int64[Tensor, " C"], number: int) -> tuple[Int64[Tensor, "C n"], Int64[Tensor, "C n"]]:
    """The first two random words of the positions 0..`number` - 1 of each stream; see `Draws.words`."""
    position = torch.arange(number, device=keys.device)
    first, second, _, _ = philox4x32((position, 0, 0, 0), key_words(keys[:, None]))
    return first, second


def uniform(keys: Int64[Tensor, " C"], number: int) -> Float64[Tensor, "C n"]:
    """Uniform numbers in [0, 1): `Draws.uniform` of each stream."""
    return (words(keys, number)[0] >> 8).double() * (1.0 / (1 << 24))


def row_order(keys: Int64[Tensor, " C"], kept: Bool[Tensor, "C N"]) -> Int64[Tensor, "C N"]:
    """The query, then the other kept rows in random order (`Draws.permutation`), then those that are not kept."""
    high, low = words(keys, kept.shape[1] - 1)
    # One number to sort by; high words of 2^31 and more must not become negative.
    by = (((high - (1 << 31)) << 32) | low).masked_fill(~kept[:, 1:], _LAST)
    others = by.sort(dim=1, stable=True).indices + 1
    return torch.cat(
        [torch.zeros_like(others[:, :1]) if others.shape[1] else others.new_zeros(len(keys), 1), others], 1
    )
