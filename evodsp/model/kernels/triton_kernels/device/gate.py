"""Device code of `gate.py`. Offsets are 64-bit. Of gates all tensors are contiguous. Strides of hidden layers: [P, c] of
the gradient, [c, h] of the weight, [P, h] of the hidden layer.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def forward(x, logits, out, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, (value * opened).to(out.dtype.element_ty), mask=inside)


@no_type_check
@triton.jit
def backward(grad, x, logits, grad_x, grad_logits, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
    through = upstream * opened
    tl.store(grad_x + at, through.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_logits + at, (through * value * (1.0 - opened)).to(grad_logits.dtype.element_ty), mask=inside)


@no_type_check
@triton.jit
def hidden_backward(
    grad, grad_strides, narrow, narrow_strides, hidden, hidden_strides, slope, sums, positions, channels, width,
    TILE: tl.constexpr, TILE_H: tl.constexpr, TILE_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [positions, hidden channels]. `slope`: [P, h], contiguous. `sums`: [tiles, h], over a tile's positions."""
    program = tl.program_id(0)
    across = tl.cdiv(width, TILE_H)
    own, part = program % across * TILE_H + tl.arange(0, TILE_H), (program // across).to(tl.int64)
    position = part * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE_H], tl.float32)
    for start in range(0, channels, TILE_C):
        channel = start + tl.arange(0, TILE_C)
        from_grad = grad + position[:, None] * grad_strides[0] + channel[None, :] * grad_strides[1]
        upstream = tl.load(from_grad, mask=(position < positions)[:, None] & (channel < channels)[None, :], other=0.0)
        from_narrow = narrow + channel[:, None] * narrow_strides[0] + own[None, :] * narrow_strides[1]
        factor = tl.load(from_narrow, mask=(channel < channels)[:, None] & (own < width)[None, :], other=0.0)
        total = tl.dot(upstream, factor, total, input_precision=PRECISION)
    from_hidden = hidden + position[:, None] * hidden_strides[0] + own[None, :] * hidden_strides[1]
    inside = (position < positions)[:, None] & (own < width)[None, :]
    opened = tl.load(from_hidden, mask=inside, other=0.0) > 0
    # The result is rounded first: threads then exchange half as much, and two programs fit a multiprocessor, so that one
    # multiplies while the other reads and writes.
    result = tl.where(opened, total.to(slope.dtype.element_ty), 0.0)
    tl.store(slope + position[:, None] * width + own[None, :], result, mask=inside)
    tl.store(sums + part * width + own, tl.sum(result.to(tl.float32), 0), mask=own < width)
