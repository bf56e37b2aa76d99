"""Device code of `outer_product.py`. Products and their gradient are contiguous [I, c, J, c]. Offsets are 64-bit.

Strides: [I, J] of the counts, [z, k] of the weight, [I, J, z] of the gradient.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def _runs(row, column, product, columns, CHANNELS: tl.constexpr):
    """Offsets of a tile [columns, products] of one row. Runs of c products of a pair lie together, and those of all columns."""
    first, second = product // CHANNELS, product % CHANNELS
    return ((row * CHANNELS + first[None, :]) * columns + column[:, None]) * CHANNELS + second[None, :]


@no_type_check
@triton.jit
def _shares(counts, counts_strides, row, column, columns):
    """1 / counts of a row's columns."""
    at = row * counts_strides[0] + column * counts_strides[1]
    return 1.0 / tl.load(counts + at, mask=column < columns, other=1.0).to(tl.float32)


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
        total *= _shares(counts, counts_strides, row, column, columns)[:, None]
    to = out + (row * columns + column[:, None]) * results + result[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (result < results)[None, :])


@no_type_check
@triton.jit
def slope(
    products, weight, weight_strides, counts, counts_strides, grad, grad_strides, slope, rows, columns, results,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile [columns, products] of one row: gradient @ weight / counts."""
    program = tl.program_id(0)
    across = tl.cdiv(CHANNELS * CHANNELS, TILE_K)
    product, program = program % across * TILE_K + tl.arange(0, TILE_K), program // across
    along = tl.cdiv(columns, TILE_J)
    column, row = (program % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64), (program // along).to(tl.int64)
    some = product < CHANNELS * CHANNELS
    total = tl.zeros([TILE_J, TILE_K], tl.float32)
    for start in range(0, results, TILE_Z):
        result = (start + tl.arange(0, TILE_Z)).to(tl.int64)
        at = row * grad_strides[0] + column[:, None] * grad_strides[1] + result[None, :] * grad_strides[2]
        upstream = tl.load(grad + at, mask=(column < columns)[:, None] & (result < results)[None, :], other=0.0)
        at = result[:, None] * weight_strides[0] + product[None, :] * weight_strides[1]
        slopes = tl.load(weight + at, mask=(result < results)[:, None] & some[None, :], other=0.0)
        total = tl.dot(upstream, slopes, total, input_precision=PRECISION)
    if counts is not None:
        total *= _shares(counts, counts_strides, row, column, columns)[:, None]
    to = slope + _runs(row, column, product, columns, CHANNELS)
    tl.store(to, total.to(slope.dtype.element_ty), mask=(column < columns)[:, None] & some[None, :])


@no_type_check
@triton.jit
def weight_gradient(
    products, weight, weight_strides, counts, counts_strides, grad, grad_strides, sums, rows, columns, results, parts,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [results, products] of the weight's gradient, summed over every `parts`-th tile of columns of all rows.

    `sums`: [parts, z cc + z], the gradients of the weight and of the bias, which programs of the first products sum.
    """
    program = tl.program_id(0)
    across = tl.cdiv(CHANNELS * CHANNELS, TILE_K)
    tile, program = program % across, program // across
    product = tile * TILE_K + tl.arange(0, TILE_K)
    blocks = tl.cdiv(results, TILE_Z)
    result, part = (program % blocks * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // blocks
    some = product < CHANNELS * CHANNELS
    along = tl.cdiv(columns, TILE_J)
    total = tl.zeros([TILE_Z, TILE_K], tl.float32)
    of_bias = tl.zeros([TILE_Z], tl.float32)
    for piece in range(part, rows * along, parts):
        row = (piece // along).to(tl.int64)
        column = (piece % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64)
        at = row * grad_strides[0] + column[:, None] * grad_strides[1] + result[None, :] * grad_strides[2]
        upstream = tl.load(grad + at, mask=(column < columns)[:, None] & (result < results)[None, :], other=0.0)
        if counts is not None:
            wide = upstream.to(tl.float32) * _shares(counts, counts_strides, row, column, columns)[:, None]
            upstream = wide.to(upstream.dtype)
        if tile == 0:
            of_bias += tl.sum(upstream.to(tl.float32), 0)
        factor = tl.load(
            products + _runs(row, column, product, columns, CHANNELS),
            mask=(column < columns)[:, None] & some[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(upstream.T, factor, total, input_precision=PRECISION)
    size = CHANNELS * CHANNELS * results
    sums += part.to(tl.int64) * (size + results)
    to = sums + result[:, None] * (CHANNELS * CHANNELS) + product[None, :]
    tl.store(to, total, mask=(result < results)[:, None] & some[None, :])
    if tile == 0:
        tl.store(sums + size + result, of_bias, mask=result < results)
