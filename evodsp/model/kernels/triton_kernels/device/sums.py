"""Device code of `sums.py`. Offsets are 64-bit."""

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


@no_type_check
@triton.jit
def column_sums(x, strides, total, rows, columns, parts, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Sums a tile of columns over every `parts`-th tile of rows. `total`: [parts, columns].

    Each row of a tile has its own sum. These are added only at the end, so that no thread needs another one's numbers
    before.
    """
    program = tl.program_id(0)
    across = tl.cdiv(columns, WIDTH)
    column, part = (program % across * WIDTH + tl.arange(0, WIDTH)).to(tl.int64), program // across
    own = tl.zeros([TILE, WIDTH], tl.float32)
    for tile in range(part, tl.cdiv(rows, TILE), parts):
        row = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        at = row[:, None] * strides[0] + column[None, :] * strides[1]
        own += tl.load(x + at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32)
    to = total + part.to(tl.int64) * columns + column
    tl.store(to, tl.sum(own, 0).to(total.dtype.element_ty), mask=column < columns)
