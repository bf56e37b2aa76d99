"""Dropout of a residual update, from addressed random numbers (supplement 1.11.6; `evodsp.rng`).

Masks are drawn for many layers at once: a layer of a small model has a few thousand elements, and the hundred operators of
Philox would cost more to launch than to run.

Shape legend: L layers, B batch, e elements of a mask, n1 n2 this rank's axes of a representation, c channels.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from evodsp.model.kernels.by_chunks import chunk_numbers
from evodsp.rng import at_least, key_words, philox4x32

# Random numbers that a GPU draws at a time: enough to fill it.
_GPU_DRAWS = 1 << 22


def draw_masks(keys: Int64[Tensor, "L B"], elements: int, rate: float) -> Bool[Tensor, "L B e"]:
    """Whether to keep each element: `Draws(key).uniform_at(element) >= rate`, bit for bit, for every layer and sample.

    `keys`: the keys of the streams (`Draws.signed_key`). `elements`: number of elements of each mask.
    """
    flat = keys.reshape(-1, 1)
    kept = torch.empty(flat.shape[0], elements, dtype=torch.bool, device=keys.device)
    piece = chunk_numbers(keys, _GPU_DRAWS)
    width = min(elements, piece)
    height = piece // max(width, 1)
    for start in range(0, elements, max(width, 1)):
        positions = torch.arange(start, min(start + width, elements), device=keys.device)
        for row in range(0, flat.shape[0], height):
            words = philox4x32((positions, 0, 0, 0), key_words(flat[row : row + height]))[0]
            kept[row : row + height, start : start + width] = at_least(words, rate)
    return kept.view(*keys.shape, elements)


def dropout_add(
    x: Float[Tensor, "B n1 n2 c"],
    update: Float[Tensor, "B n1 n2 c"],
    drawn: Bool[Tensor, "B e"] | Int64[Tensor, " B"],
    rate: float,
    offsets: tuple[int, int],
    whole: tuple[int, int],
    shared_dim: int,
) -> Float[Tensor, "B n1 n2 c"]:
    """x + update * keep / (1 - rate), scaled and added in fp32 at least, in the dtype of x.

    `drawn`: the mask of the WHOLE representation, constant along `shared_dim` (1 or 2), as `draw_masks` draws it: e counts the
    elements of the other axis and of the channels. Or the keys to draw it from here. `whole`: sizes of axes 1 and 2 over all
    shards; `offsets`: where this shard begins.
    """
    sizes = [*whole, x.shape[-1]]
    sizes[shared_dim - 1] = 1
    if drawn.dtype != torch.bool:
        drawn = draw_masks(drawn.unsqueeze(0), math.prod(sizes), rate).squeeze(0)
    other = 3 - shared_dim
    keep = drawn.view(len(drawn), *sizes).narrow(other, offsets[other - 1], x.shape[other])
    # The mask is exact in every precision and the scale stays a number, which `addcmul` applies in fp32 at least.
    return torch.addcmul(x, update, keep.to(x.dtype), value=1.0 / (1.0 - rate)).to(x.dtype)
