"""Device code of `sums.py`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def sum_of_parts(parts, total, count, size, TILE: tl.constexpr):
    """Adds `count` vectors of `size` elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    sums = tl.zeros([TILE], tl.float32)
    for part in range(count):
        sums += tl.load(parts + tl.cast(part, tl.int64) * size + at, mask=inside, other=0.0)
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=inside)
