"""Device code of `relu.py`. Offsets are 64-bit."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def backward(
    grad, hidden, slope, sums, positions, channels, parts, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some channels of every `parts`-th tile of positions. `sums`: [parts, channels], over these positions."""
    program = tl.program_id(0)
    across = tl.cdiv(channels, WIDTH)
    channel, part = program % across * WIDTH + tl.arange(0, WIDTH), program // across
    total = tl.zeros([WIDTH], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        inside = (position < positions)[:, None] & (channel < channels)[None, :]
        at = position[:, None] * channels + channel[None, :]
        upstream = tl.load(grad + at, mask=inside, other=0.0)
        result = tl.where(tl.load(hidden + at, mask=inside, other=0.0) > 0, upstream, 0.0)
        tl.store(slope + at, result, mask=inside)
        total += tl.sum(result.to(tl.float32), 0)
    tl.store(sums + part.to(tl.int64) * channels + channel, total, mask=channel < channels)
