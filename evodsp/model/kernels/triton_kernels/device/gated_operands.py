"""Device code of `gated_operands.py`. Offsets are 64-bit.

Strides: [B, I, J, cc] of values and gates, [B, I, J] of the mask.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def _place(rows, columns, channels, TILE_J: tl.constexpr, TILE_C: tl.constexpr):
    """Sample, row, columns and channels of this program. Tiles of channels vary fastest: they read the same lines of memory."""
    program = tl.program_id(0)
    across = tl.cdiv(channels, TILE_C)
    channel, program = program % across * TILE_C + tl.arange(0, TILE_C), program // across
    along = tl.cdiv(columns, TILE_J)
    column, program = program % along * TILE_J + tl.arange(0, TILE_J), program // along
    return (program // rows).to(tl.int64), (program % rows).to(tl.int64), column.to(tl.int64), channel.to(tl.int64)


@no_type_check
@triton.jit
def _tile(strides, sample, row, column, channel):
    return sample * strides[0] + row * strides[1] + column[:, None] * strides[2] + channel[None, :] * strides[3]


@no_type_check
@triton.jit
def _present(mask, strides, sample, row, column, columns):
    at = sample * strides[0] + row * strides[1] + column * strides[2]
    return tl.load(mask + at, mask=column < columns, other=0).to(tl.float32)[:, None]


@no_type_check
@triton.jit
def forward(
    values, gates, mask, values_strides, gates_strides, mask_strides, out, batch, rows, columns, channels,
    TILE_J: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """A tile [columns, channels] of one row. `out`: [2, B, c, I, J], contiguous."""
    sample, row, column, channel = _place(rows, columns, channels, TILE_J, TILE_C)
    inside = (column < columns)[:, None] & (channel < channels)[None, :]
    value = tl.load(values + _tile(values_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + _tile(gates_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    result = value * tl.sigmoid(gate) * _present(mask, mask_strides, sample, row, column, columns)
    each = channels // 2
    plane = (channel // each * batch + sample) * each + channel % each
    to = out + (plane[:, None] * rows + row) * columns + column[None, :]
    tl.store(to, result.T.to(out.dtype.element_ty), mask=(channel < channels)[:, None] & (column < columns)[None, :])


@no_type_check
@triton.jit
def backward(
    grad, grad_strides, values, gates, mask, values_strides, gates_strides, mask_strides, grad_values, grad_gates,
    sums, batch, rows, columns, channels, TILE_J: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """A tile [columns, channels] of one row. `grad`: [2, B, c, I, J] with strides; results: halves of [B, I, J, 2 cc], and
    `sums` [B I tiles, 2 cc], their sums over a tile's columns."""
    sample, row, column, channel = _place(rows, columns, channels, TILE_J, TILE_C)
    inside = (column < columns)[:, None] & (channel < channels)[None, :]
    value = tl.load(values + _tile(values_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + _tile(gates_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    each = channels // 2
    plane = channel // each * grad_strides[0] + sample * grad_strides[1] + channel % each * grad_strides[2]
    at = grad + plane[:, None] + row * grad_strides[3] + column[None, :] * grad_strides[4]
    upstream = tl.load(at, mask=(channel < channels)[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32).T
    opened = tl.sigmoid(gate)
    through = upstream * opened * _present(mask, mask_strides, sample, row, column, columns)
    to = ((sample * rows + row) * columns + column[:, None]) * (2 * channels) + channel[None, :]
    tl.store(grad_values + to, through.to(grad_values.dtype.element_ty), mask=inside)
    of_gates = through * value * (1.0 - opened)
    tl.store(grad_gates + to, of_gates.to(grad_gates.dtype.element_ty), mask=inside)
    part = (tl.program_id(0) // tl.cdiv(channels, TILE_C)).to(tl.int64)
    to_sums = sums + part * (2 * channels) + channel
    tl.store(to_sums, tl.sum(through, 0), mask=channel < channels)
    tl.store(to_sums + channels, tl.sum(of_gates, 0), mask=channel < channels)
