"""Device code of `outer_product.py`. Products and their gradient are contiguous [I, c, J, c]. Offsets are 64-bit.

Strides: [I, J] of the counts, [z, k] of the weight, [I, J, z] of the gradient. The scaled gradient is contiguous [I J, z].
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def _runs(row, column, product, columns, CHANNELS: tl.constexpr):
    """Offsets of a tile [columns, products] of one row. The c runs of a pair are c products long each, and the runs of all
    columns follow each other.
    """
    first, second = product // CHANNELS, product % CHANNELS
    return ((row * CHANNELS + first[None, :]) * columns + column[:, None]) * CHANNELS + second[None, :]


@no_type_check
@triton.jit
def project(
    products, weight, weight_strides, bias, counts, counts_strides, out, rows, columns, results,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [columns, results] of one row. `out`: [I, J, z], contiguous."""
    program = tl.program_id(0)
    across = tl.cdiv(results, TILE_Z)
    result, program = (program % across * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // across
    along = tl.cdiv(columns, TILE_J)
    column, row = (program % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64), (program // along).to(tl.int64)
    total = tl.zeros([TILE_J, TILE_Z], tl.float32)
    for start in range(0, CHANNELS * CHANNELS, TILE_K):
        product = start + tl.arange(0, TILE_K)
        some = product < CHANNELS * CHANNELS
        factor = tl.load(
            products + _runs(row, column, product, columns, CHANNELS),
            mask=(column < columns)[:, None] & some[None, :], other=0.0,
        )  # fmt: skip
        at = product[:, None] * weight_strides[1] + result[None, :] * weight_strides[0]
        slopes = tl.load(weight + at, mask=some[:, None] & (result < results)[None, :], other=0.0)
        total = tl.dot(factor, slopes, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + result, mask=result < results, other=0.0).to(tl.float32)[None, :]
    if counts is not None:
        at = row * counts_strides[0] + column * counts_strides[1]
        number = tl.load(counts + at, mask=column < columns, other=1.0).to(tl.float32)
        total *= (1.0 / number)[:, None]
    to = out + (row * columns + column[:, None]) * results + result[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (result < results)[None, :])


@no_type_check
@triton.jit
def scale(
    grad, grad_strides, counts, counts_strides, scaled, sums, positions, columns, results, parts,
    TILE: tl.constexpr, TILE_Z: tl.constexpr,
):  # fmt: skip
    """gradient / counts, of every `parts`-th tile of positions. `scaled`: [I J, z], contiguous; `sums`: [parts, z]."""
    program = tl.program_id(0)
    across = tl.cdiv(results, TILE_Z)
    result, part = (program % across * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // across
    own = tl.zeros([TILE, TILE_Z], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tile * TILE + tl.arange(0, TILE)
        inside = (position < positions)[:, None] & (result < results)[None, :]
        row, column = (position // columns).to(tl.int64), (position % columns).to(tl.int64)
        at = row[:, None] * grad_strides[0] + column[:, None] * grad_strides[1] + result[None, :] * grad_strides[2]
        upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if counts is not None:
            at = row * counts_strides[0] + column * counts_strides[1]
            number = tl.load(counts + at, mask=position < positions, other=1.0).to(tl.float32)
            upstream *= (1.0 / number)[:, None]
        own += upstream
        to = scaled + position.to(tl.int64)[:, None] * results + result[None, :]
        tl.store(to, upstream.to(scaled.dtype.element_ty), mask=inside)
    tl.store(sums + part.to(tl.int64) * results + result, tl.sum(own, 0), mask=result < results)


@no_type_check
@triton.jit
def _scaled(scaled, row, column, result, columns, results):
    """A tile [columns, results] of one row of the scaled gradient."""
    at = (row * columns + column[:, None]) * results + result[None, :]
    return tl.load(scaled + at, mask=(column < columns)[:, None] & (result < results)[None, :], other=0.0)


@no_type_check
@triton.jit
def _slopes(weight, weight_strides, result, product, results, CHANNELS: tl.constexpr):
    """A tile [results, products] of the weight."""
    at = result.to(tl.int64)[:, None] * weight_strides[0] + product[None, :] * weight_strides[1]
    inside = (result < results)[:, None] & (product < CHANNELS * CHANNELS)[None, :]
    return tl.load(weight + at, mask=inside, other=0.0)


@no_type_check
@triton.jit
def slope(
    scaled, weight, weight_strides, slope, rows, columns, results,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, ONE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of all products of a tile of columns of one row: scaled gradient @ weight.

    `ONE`: whether all results are in one tile; the gradient is then read once. The weight stays in the cache.
    """
    program = tl.program_id(0)
    along = tl.cdiv(columns, TILE_J)
    column, row = (program % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64), (program // along).to(tl.int64)
    result = tl.arange(0, TILE_Z)
    if ONE:
        upstream = _scaled(scaled, row, column, result, columns, results)
    for start in range(0, CHANNELS * CHANNELS, TILE_K):
        product = start + tl.arange(0, TILE_K)
        if ONE:
            slopes = _slopes(weight, weight_strides, result, product, results, CHANNELS)
            total = tl.dot(upstream, slopes, input_precision=PRECISION)
        else:
            total = tl.zeros([TILE_J, TILE_K], tl.float32)
            for first in range(0, results, TILE_Z):
                some = _scaled(scaled, row, column, first + result, columns, results)
                slopes = _slopes(weight, weight_strides, first + result, product, results, CHANNELS)
                total = tl.dot(some, slopes, total, input_precision=PRECISION)
        inside = (column < columns)[:, None] & (product < CHANNELS * CHANNELS)[None, :]
        tl.store(slope + _runs(row, column, product, columns, CHANNELS), total.to(slope.dtype.element_ty), mask=inside)


@no_type_check
@triton.jit
def weight_gradient(
    scaled, products, sums, rows, columns, results, parts,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [results, products] of the weight's gradient, summed over every `parts`-th tile of columns of all rows. `sums`:
    [parts, z, cc]."""
    program = tl.program_id(0)
    across = tl.cdiv(CHANNELS * CHANNELS, TILE_K)
    product, program = program % across * TILE_K + tl.arange(0, TILE_K), program // across
    blocks = tl.cdiv(results, TILE_Z)
    result, part = (program % blocks * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // blocks
    some = product < CHANNELS * CHANNELS
    along = tl.cdiv(columns, TILE_J)
    total = tl.zeros([TILE_Z, TILE_K], tl.float32)
    for piece in range(part, rows * along, parts):
        row = (piece // along).to(tl.int64)
        column = (piece % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64)
        upstream = _scaled(scaled, row, column, result, columns, results)
        factor = tl.load(
            products + _runs(row, column, product, columns, CHANNELS),
            mask=(column < columns)[:, None] & some[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(upstream.T, factor, total, input_precision=PRECISION)
    size = CHANNELS * CHANNELS * results
    to = sums + part.to(tl.int64) * size + result[:, None] * (CHANNELS * CHANNELS) + product[None, :]
    tl.store(to, total, mask=(result < results)[:, None] & some[None, :])
