"""Dropout whose mask is a function of global positions, so that every mesh of ranks drops the same elements."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.rng import Draws, at_least


def dropout(x: Tensor, rate: float, positions: Tensor, draws: Draws) -> Tensor:
    """`x` [..., C] with elements set to zero with probability `rate`, and the others divided by 1 - `rate`.

    `positions`: int64, broadcastable to [...]: the number of each vector in the WHOLE tensor, for instance `torch.arange(T
    * S).view(T, S)`, sharded like `x`. Vectors of different samples need different numbers, or they share a mask. `draws`:
    a random stream for this call, for instance `Draws.root(seed).at("attention", layer, step)`. The same stream, positions
    and rate give the same mask on one device, on any shard, and when activations are recomputed. The masks of
    `torch.nn.Dropout` are valid too, but depend on the number of ranks.

    Raises ValueError if `rate` is not in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate {rate} is not in [0, 1)")
    if rate == 0.0:
        return x
    channels = x.shape[-1]
    element = positions.unsqueeze(-1) * channels + torch.arange(channels, device=x.device)
    # The scale is a number, so it is not rounded to the precision of x.
    return torch.where(at_least(draws.words(element)[0], rate), x * (1.0 / (1.0 - rate)), 0.0)
