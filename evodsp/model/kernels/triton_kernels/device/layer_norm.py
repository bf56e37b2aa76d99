"""Device code of `layer_norm.py`. Strides are those of three axes of positions and of channels. Offsets are 64-bit."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def _offsets(strides, position, n1, n2, channel):
    """Offsets of a tile [position, channel]; positions are numbered over three axes."""
    outer = position // n2
    rows = outer // n1 * strides[0] + outer % n1 * strides[1] + position % n2 * strides[2]
    return rows[:, None] + channel.to(tl.int64)[None, :] * strides[3]


@no_type_check
@triton.jit
def _centred(value, inside, channels, eps):
    """x - mean of a tile, 0 where there is no element; mean and 1 / deviation of each position."""
    middle = tl.sum(value, 1) / channels
    centred = tl.where(inside, value - middle[:, None], 0.0)
    return centred, middle, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / channels + eps)


@no_type_check
@triton.jit
def _gradients(upstream, normal, slope, of_deviation, channels):
    """Of a tile [positions, channels] of x, and of weight and bias over its positions. `normal`: (x - mean) / deviation."""
    weighted = upstream * slope[None, :]
    along = tl.sum(weighted * normal, 1) / channels
    average = tl.sum(weighted, 1) / channels
    of_x = (weighted - average[:, None] - normal * along[:, None]) * of_deviation[:, None]
    return of_x, tl.sum(upstream * normal, 0), tl.sum(upstream, 0)


@no_type_check
@triton.jit
def forward(
    x, x_strides, weight, weight_stride, bias, bias_stride, out, mean, inverse, positions, n1, n2, channels, eps,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of positions. `out` is contiguous."""
    position = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, WIDTH)
    inside = (position < positions)[:, None] & (channel < channels)[None, :]
    value = tl.load(x + _offsets(x_strides, position, n1, n2, channel), mask=inside, other=0.0).to(tl.float32)
    centred, middle, of_deviation = _centred(value, inside, channels, eps)
    slope = tl.load(weight + channel * weight_stride, mask=channel < channels, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel * bias_stride, mask=channel < channels, other=0.0).to(tl.float32)
    result = centred * of_deviation[:, None] * slope[None, :] + shift[None, :]
    tl.store(out + position[:, None] * channels + channel[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + position, middle, mask=position < positions)
    tl.store(inverse + position, of_deviation, mask=position < positions)


@no_type_check
@triton.jit
def backward(
    grad, grad_strides, x, x_strides, weight, weight_stride, mean, inverse, grad_x, grad_x_strides, sums,
    positions, n1, n2, channels, parts, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Every `parts`-th tile of positions. `sums`: [parts, 2, channels], gradients of weight and bias over these positions."""
    part = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    slope = tl.load(weight + channel * weight_stride, mask=channel < channels, other=0.0).to(tl.float32)
    of_weight = tl.zeros([WIDTH], tl.float32)
    of_bias = tl.zeros([WIDTH], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        inside = (position < positions)[:, None] & (channel < channels)[None, :]
        upstream = tl.load(grad + _offsets(grad_strides, position, n1, n2, channel), mask=inside, other=0.0).to(
            tl.float32
        )
        value = tl.load(x + _offsets(x_strides, position, n1, n2, channel), mask=inside, other=0.0).to(tl.float32)
        middle = tl.load(mean + position, mask=position < positions, other=0.0)
        of_deviation = tl.load(inverse + position, mask=position < positions, other=0.0)
        normal = tl.where(inside, (value - middle[:, None]) * of_deviation[:, None], 0.0)
        result, tile_of_weight, tile_of_bias = _gradients(upstream, normal, slope, of_deviation, channels)
        of_weight += tile_of_weight
        of_bias += tile_of_bias
        tl.store(
            grad_x + _offsets(grad_x_strides, position, n1, n2, channel), result.to(grad_x.dtype.element_ty), mask=inside
        )  # fmt: skip
    sums += part.to(tl.int64) * 2 * channels + channel
    tl.store(sums, of_weight, mask=channel < channels)
    tl.store(sums + channels, of_bias, mask=channel < channels)


@no_type_check
@triton.jit
def again(
    grad, grad_strides, x, x_strides, weight, weight_stride, bias, bias_stride, out, grad_x, grad_x_strides, sums,
    positions, n1, n2, channels, parts, eps, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`forward` and `backward` of every `parts`-th tile of positions, which is read once for both."""
    part = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    slope = tl.load(weight + channel * weight_stride, mask=channel < channels, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel * bias_stride, mask=channel < channels, other=0.0).to(tl.float32)
    of_weight = tl.zeros([WIDTH], tl.float32)
    of_bias = tl.zeros([WIDTH], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        inside = (position < positions)[:, None] & (channel < channels)[None, :]
        value = tl.load(x + _offsets(x_strides, position, n1, n2, channel), mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + _offsets(grad_strides, position, n1, n2, channel), mask=inside, other=0.0).to(
            tl.float32
        )
        centred, _, of_deviation = _centred(value, inside, channels, eps)
        normal = centred * of_deviation[:, None]
        result = normal * slope[None, :] + shift[None, :]
        tl.store(out + position[:, None] * channels + channel[None, :], result.to(out.dtype.element_ty), mask=inside)
        found, tile_of_weight, tile_of_bias = _gradients(upstream, normal, slope, of_deviation, channels)
        of_weight += tile_of_weight
        of_bias += tile_of_bias
        tl.store(
            grad_x + _offsets(grad_x_strides, position, n1, n2, channel), found.to(grad_x.dtype.element_ty), mask=inside
        )
    sums += part.to(tl.int64) * 2 * channels + channel
    tl.store(sums, of_weight, mask=channel < channels)
    tl.store(sums + channels, of_bias, mask=channel < channels)
