"""Device code of `layer_norm.py`.

Positions are numbered over at most three axes, [n0, n1, n2], of which AXES are told apart: a tensor's `strides` are those of
these three axes and of channels. Numbers of positions are 32-bit, offsets 64-bit.

In the kernels of gradients the channels of a position lie in one warp, if they are not too many. Sums over the positions of a
tile are left to the end of a program: until then each thread adds up what it holds.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def _rows(strides, position, n1, n2, AXES: tl.constexpr):
    """Offset of each position."""
    if AXES == 1:
        return position.to(tl.int64) * strides[2]
    outer = position // n2
    inner = (position - outer * n2).to(tl.int64) * strides[2]
    if AXES == 2:
        return inner + outer.to(tl.int64) * strides[1]
    outermost = outer // n1
    return inner + (outer - outermost * n1).to(tl.int64) * strides[1] + outermost.to(tl.int64) * strides[0]


@no_type_check
@triton.jit
def _centred(value, channel, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, eps):
    """x - mean over channels; mean and 1 / deviation of each position. `value` is 0 where no element exists."""
    middle = tl.sum(value, 1) / CHANNELS
    centred = value - middle[:, None]
    if CHANNELS != WIDTH:
        centred = tl.where((channel < CHANNELS)[None, :], centred, 0.0)
    return centred, middle, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / CHANNELS + eps)


@no_type_check
@triton.jit
def _of_x(upstream, normal, slope, of_deviation, CHANNELS: tl.constexpr):
    """The gradient of x. `normal`: (x - mean) / deviation. All are [TILE, WIDTH], or broadcast to it."""
    weighted = upstream * slope
    along = tl.sum(weighted * normal, 1) / CHANNELS
    average = tl.sum(weighted, 1) / CHANNELS
    return (weighted - average[:, None] - normal * along[:, None]) * of_deviation


@no_type_check
@triton.jit
def _store_sums(sums, part, channel, of_weight, of_bias, CHANNELS: tl.constexpr):
    """Sums over the positions of a program: tiles [TILE, WIDTH] become rows of `sums`, [parts, 2, CHANNELS]."""
    sums += part.to(tl.int64) * 2 * CHANNELS + channel
    tl.store(sums, tl.sum(of_weight, 0), mask=channel < CHANNELS)
    tl.store(sums + CHANNELS, tl.sum(of_bias, 0), mask=channel < CHANNELS)


@no_type_check
@triton.jit
def forward(
    x, x_strides, weight, weight_stride, bias, bias_stride, out, mean, inverse, positions, n1, n2, eps,
    AXES: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of positions. `out` is contiguous."""
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, WIDTH)
    inside = (position < positions)[:, None] & (channel < CHANNELS)[None, :]
    along = channel.to(tl.int64)[None, :] * x_strides[3]
    value = tl.load(x + _rows(x_strides, position, n1, n2, AXES)[:, None] + along, mask=inside, other=0.0).to(
        tl.float32
    )
    centred, middle, of_deviation = _centred(value, channel, CHANNELS, WIDTH, eps)
    slope = tl.load(weight + channel * weight_stride, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel * bias_stride, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    result = centred * of_deviation[:, None] * slope[None, :] + shift[None, :]
    at = position.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + position, middle, mask=position < positions)
    tl.store(inverse + position, of_deviation, mask=position < positions)


@no_type_check
@triton.jit
def backward(
    grad, grad_strides, x, x_strides, weight, weight_stride, mean, inverse, grad_x, grad_x_strides, sums,
    positions, n1, n2, parts, AXES: tl.constexpr, CHANNELS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Every `parts`-th tile of positions. `sums`: [parts, 2, CHANNELS], gradients of weight and bias over these positions."""
    part = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    slope = tl.load(weight + channel * weight_stride, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    along = channel.to(tl.int64)[None, :]
    own = tl.arange(0, TILE)
    of_weight = tl.zeros([TILE, WIDTH], tl.float32)
    of_bias = tl.zeros([TILE, WIDTH], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tile * TILE + own
        there = position < positions
        inside = there[:, None] & (channel < CHANNELS)[None, :]
        at = _rows(x_strides, position, n1, n2, AXES)[:, None] + along * x_strides[3]
        value = tl.load(x + at, mask=inside, other=0.0)
        at = _rows(grad_strides, position, n1, n2, AXES)[:, None] + along * grad_strides[3]
        upstream = tl.load(grad + at, mask=inside, other=0.0)
        middle = tl.load(mean + position, mask=there, other=0.0)[:, None]
        of_deviation = tl.load(inverse + position, mask=there, other=0.0)[:, None]
        value, upstream = value.to(tl.float32), upstream.to(tl.float32)
        normal = (value - middle) * of_deviation  # padding is included, and its `upstream` is 0
        found = _of_x(upstream, normal, slope, of_deviation, CHANNELS)
        of_weight += upstream * normal
        of_bias += upstream
        at = _rows(grad_x_strides, position, n1, n2, AXES)[:, None] + along * grad_x_strides[3]
        tl.store(grad_x + at, found.to(grad_x.dtype.element_ty), mask=inside)
    _store_sums(sums, part, channel, of_weight, of_bias, CHANNELS)


@no_type_check
@triton.jit
def again(
    grad, grad_strides, x, x_strides, weight, weight_stride, bias, bias_stride, out, grad_x, grad_x_strides, sums,
    positions, n1, n2, parts, eps, AXES: tl.constexpr, CHANNELS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes `forward` and `backward` of every `parts`-th tile of positions, which is read once for both."""
    part = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    slope = tl.load(weight + channel * weight_stride, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(bias + channel * bias_stride, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    along = channel.to(tl.int64)[None, :]
    own = tl.arange(0, TILE)
    of_weight = tl.zeros([TILE, WIDTH], tl.float32)
    of_bias = tl.zeros([TILE, WIDTH], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tile * TILE + own
        inside = (position < positions)[:, None] & (channel < CHANNELS)[None, :]
        at = _rows(x_strides, position, n1, n2, AXES)[:, None] + along * x_strides[3]
        value = tl.load(x + at, mask=inside, other=0.0)
        at = _rows(grad_strides, position, n1, n2, AXES)[:, None] + along * grad_strides[3]
        upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        centred, _, of_deviation = _centred(value.to(tl.float32), channel, CHANNELS, WIDTH, eps)
        of_deviation = of_deviation[:, None]
        normal = centred * of_deviation
        at = position.to(tl.int64)[:, None] * CHANNELS + along
        tl.store(out + at, (normal * slope + shift).to(out.dtype.element_ty), mask=inside)
        found = _of_x(upstream, normal, slope, of_deviation, CHANNELS)
        of_weight += upstream * normal
        of_bias += upstream
        at = _rows(grad_x_strides, position, n1, n2, AXES)[:, None] + along * grad_x_strides[3]
        tl.store(grad_x + at, found.to(grad_x.dtype.element_ty), mask=inside)
    _store_sums(sums, part, channel, of_weight, of_bias, CHANNELS)
