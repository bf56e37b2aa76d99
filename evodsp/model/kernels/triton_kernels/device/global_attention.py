"""Device code of `global_attention.py`. Strides: [B, r, H, D] of q, [B, s, r, D] of k and v, [B, s, r] of the mask.

A program takes one column. Logits are in base 2, sequences x heads. Offsets are 64-bit. The width is known to the compiler, so
that a thread reads all channels of a sequence at once.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(1.4426950408889634e9)
SMALLEST = tl.constexpr(-3.4028234663852886e38)


@no_type_check
@triton.jit
def _small(strides, sample, column, HEADS: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of a tile [heads, D] of a column."""
    head, channel = tl.arange(0, HEADS).to(tl.int64), tl.arange(0, PADDED).to(tl.int64)
    return sample * strides[0] + column * strides[1] + head[:, None] * strides[2] + channel[None, :] * strides[3]


@no_type_check
@triton.jit
def _long(strides, sample, column, sequence, PADDED: tl.constexpr):
    """Offsets of a tile [sequences, D] of a column."""
    channel = tl.arange(0, PADDED).to(tl.int64)
    return sample * strides[0] + column * strides[2] + sequence[:, None] * strides[1] + channel[None, :] * strides[3]


@no_type_check
@triton.jit
def _logits(some_k, own_q, keys, keys_strides, sample, column, sequence, sequences, scale, PRECISION: tl.constexpr):
    at = sample * keys_strides[0] + column * keys_strides[2] + sequence * keys_strides[1]
    present = tl.load(keys + at, mask=sequence < sequences, other=0).to(tl.float32)
    masked = tl.where(sequence < sequences, (present - 1.0) * MASKED, float("-inf"))
    return tl.dot(some_k, own_q.T, input_precision=PRECISION) * (scale * LOG2_E) + masked[:, None]


@no_type_check
@triton.jit
def forward(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, sums,
    sequences, columns, heads, scale,
    TILE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, column = program // columns, program % columns
    head, channel = tl.arange(0, HEADS), tl.arange(0, PADDED)
    cell = (head < heads)[:, None] & (channel < WIDTH)[None, :]
    own_q = tl.load(q + _small(q_strides, sample, column, HEADS, PADDED), mask=cell, other=0.0)
    top = tl.full([HEADS], SMALLEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, sequences, TILE):
        sequence = (start + tl.arange(0, TILE)).to(tl.int64)
        inside = (sequence < sequences)[:, None] & (channel < WIDTH)[None, :]
        some_k = tl.load(k + _long(k_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        some_v = tl.load(v + _long(v_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        logits = _logits(some_k, own_q, keys, keys_strides, sample, column, sequence, sequences, scale, PRECISION)
        new_top = tl.maximum(top, tl.max(logits, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[None, :])
        total = total * fade + tl.sum(weights, 0)
        weighted = tl.dot(weights.to(some_v.dtype).T, some_v, weighted * fade[:, None], input_precision=PRECISION)
        top = new_top
    to_sums = sums + (program * heads + head) * (WIDTH + 2)
    tl.store(to_sums[:, None] + channel[None, :], weighted, mask=cell)
    tl.store(to_sums + WIDTH, total, mask=head < heads)
    tl.store(to_sums + WIDTH + 1, top, mask=head < heads)


@no_type_check
@triton.jit
def backward(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, sequences, columns, heads, scale,
    grad_sums, grad_sums_strides, grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides, sums,
    TILE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, column = program // columns, program % columns
    head, channel = tl.arange(0, HEADS), tl.arange(0, PADDED)
    cell = (head < heads)[:, None] & (channel < WIDTH)[None, :]
    own_q = tl.load(q + _small(q_strides, sample, column, HEADS, PADDED), mask=cell, other=0.0)
    from_above = grad_sums + _small(grad_sums_strides, sample, column, HEADS, PADDED)
    above = tl.load(from_above, mask=cell, other=0.0).to(own_q.dtype)
    at = sample * grad_sums_strides[0] + column * grad_sums_strides[1] + head.to(tl.int64) * grad_sums_strides[2]
    constant = tl.load(grad_sums + at + WIDTH * grad_sums_strides[3], mask=head < heads, other=0.0)
    # Heads that do not exist get no weight.
    at_top = (program * heads + head) * (WIDTH + 2) + WIDTH + 1
    top = tl.load(sums + at_top, mask=head < heads, other=float("inf"))
    slope_k = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, sequences, TILE):
        sequence = (start + tl.arange(0, TILE)).to(tl.int64)
        inside = (sequence < sequences)[:, None] & (channel < WIDTH)[None, :]
        some_k = tl.load(k + _long(k_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        some_v = tl.load(v + _long(v_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        logits = _logits(some_k, own_q, keys, keys_strides, sample, column, sequence, sequences, scale, PRECISION)
        weights = tl.exp2(logits - top[None, :])
        slope = weights * (tl.dot(some_v, above.T, input_precision=PRECISION) + constant[None, :])
        of_k = tl.dot(slope.to(own_q.dtype), own_q, input_precision=PRECISION) * scale
        of_v = tl.dot(weights.to(own_q.dtype), above, input_precision=PRECISION)
        to_k = grad_k + _long(grad_k_strides, sample, column, sequence, PADDED)
        to_v = grad_v + _long(grad_v_strides, sample, column, sequence, PADDED)
        tl.store(to_k, of_k.to(grad_k.dtype.element_ty), mask=inside)
        tl.store(to_v, of_v.to(grad_v.dtype.element_ty), mask=inside)
        slope_k = tl.dot(slope.to(some_k.dtype).T, some_k, slope_k, input_precision=PRECISION)
    to_q = grad_q + _small(grad_q_strides, sample, column, HEADS, PADDED)
    tl.store(to_q, (slope_k * scale).to(grad_q.dtype.element_ty), mask=cell)
