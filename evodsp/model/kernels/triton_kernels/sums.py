"""Sums over the rows of a matrix (gradients of biases), and of the partial sums of several programs in a fixed order.

torch gives each group of threads a few columns of all rows; a matrix with many more rows than columns then does not fill a
GPU. Here programs share the rows, and their partial sums are added in a fixed order.

The kernels' offsets are 64-bit.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, next_power_of_two, tiles


@no_type_check
@triton.jit
def of_parts(parts, total, count, size, TILE_P: tl.constexpr, TILE: tl.constexpr):
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
def of_columns(x, strides, total, rows, columns, parts, TILE: tl.constexpr, WIDTH: tl.constexpr):
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


# Elements of a tile [parts, results], its largest number of parts, and its smallest number of results: a sector of memory. As
# many parts as possible are loaded at once, because a step of the loop costs the latency of memory.
_TILE, _PARTS, _RESULTS = 4096, 1024, 8


def sum_of_parts(launch: Launcher, parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of `parts`, fp32 and contiguous, rounded to `dtype` once."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    at_once = min(_PARTS, next_power_of_two(len(parts)))
    width = max(_RESULTS, _TILE // at_once)
    launch(
        Launch(
            "sums.of_parts",
            tiles(total.numel(), width),
            {"parts": parts, "total": total, "count": len(parts), "size": total.numel()},
            {"TILE_P": at_once, "TILE": width},
            writes=("total",),
            warps=8,
        )
    )
    return total


# Bytes of a tile: eight loads of 16 bytes for each thread, which are under way together.
_BYTES, _WARPS = 32 << 10, 8
# Largest number of columns of a tile: runs of memory are long enough, and few columns are padding.
_COLUMNS = 256
# Largest number of programs: two per multiprocessor of an H100, so that one adds while the other waits. Each writes a partial
# sum.
_PROGRAMS = 264


def column_sums(x: Float[Tensor, "rows columns"], dtype: torch.dtype) -> Float[Tensor, " columns"]:
    """The sum of all rows, taken in fp32 and rounded to `dtype` once. Rows may have any stride. It is not differentiable."""
    return _sums(x, dtype)


def _body(launch: Launcher, x: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = x.shape
    width = min(_COLUMNS, next_power_of_two(max(1, columns)))
    tile = min(_BYTES // (width * x.element_size()), next_power_of_two(max(1, rows)))
    across, along = tiles(columns, width), tiles(rows, tile)
    # The fewest programs for which each takes equally many tiles.
    parts = tiles(along, tiles(along * across, _PROGRAMS)) if rows and columns else 1
    make = x.new_empty if rows else x.new_zeros  # an empty grid fills nothing
    total = make(parts, columns, dtype=dtype if parts == 1 else torch.float32)
    launch(
        Launch(
            "sums.of_columns",
            parts * across if rows else 0,
            {"x": x, "strides": x.stride(), "total": total, "rows": rows, "columns": columns, "parts": parts},
            {"TILE": tile, "WIDTH": width},
            writes=("total",),
            warps=_WARPS,
        )
    )
    return sum_of_parts(launch, total, dtype)


_sums = Operator("column_sums", "(Tensor x, ScalarType dtype) -> Tensor", _body)
OPERATORS = (_sums,)
