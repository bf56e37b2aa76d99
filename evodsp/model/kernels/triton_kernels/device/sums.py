"""Device code of `sums.py`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def sum_of_parts(parts, total, count, size, TILE_P: tl.constexpr, TILE: tl.constexpr):
    """Adds `count` vectors of `size` elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    part = tl.arange(0, TILE_P)
    sums = tl.zeros([TILE_P, TILE], tl.float32)
    for start in range(0, count, TILE_P):
        row = (start + part).to(tl.int64)
        inside = (row < count)[:, None] & (at < size)[None, :]
        sums += tl.load(parts + row[:, None] * size + at[None, :], mask=inside, other=0.0)
    tl.store(total + at, tl.sum(sums, 0).to(total.dtype.element_ty), mask=at < size)
