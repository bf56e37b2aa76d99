"""Layer normalisation over channels. The input and two numbers per position are kept for the backward pass.

Statistics and arithmetic are fp32. Gradients of weight and bias are summed by each program over its positions, then over
programs in a fixed order.

Kernels number positions over at most three axes, [n0, n1, n2], of which AXES are told apart: a tensor's `strides` are those of
these three axes and of channels. Numbers of positions are 32-bit, offsets 64-bit.

In the kernels of gradients the channels of a position lie in one warp, if they are not too many. Sums over the positions of a
tile are left to the end of a program: until then each thread adds up what it holds.

Shape legend: c channels, * any other axes, P positions (all of them flattened).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, next_power_of_two, tiles
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts


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


_EPS = 1e-5
# Elements of a tile [positions, channels] in the forward pass.
_TILE = 4096
# Number of vectors of a tensor that a thread loads at once in the backward pass, and bytes of a vector.
_VECTORS, _VECTOR = 2, 16
# Largest number of programs in the backward pass, and number of their warps. Each program writes one sum of the gradients of
# weight and bias. All programs are resident at once on 132 multiprocessors.
_PARTS, _WARPS = 528, 4


def layer_norm(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, " c"], bias: Float[Tensor, " c"], eps: float = _EPS
) -> Float[Tensor, "*batch c"]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in the dtype of x, contiguous.

    So the norm of a transposed view has the layout that the next matrix product needs. The dtype of weight and bias may be
    wider than that of x. It is differentiable once in all three.
    """
    return _forward(_with_four_axes(x), weight, bias, eps)[0].view(x.shape)


def norm(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, " c"], bias: Float[Tensor, " c"]
) -> tuple[Float[Tensor, "*batch c"], Float[Tensor, "_ _ _"], Float[Tensor, "_ _ _"]]:
    """The result, and mean and inverse standard deviation of each position, for `norm_gradients`."""
    result, mean, inverse = _forward(_with_four_axes(x), weight, bias, _EPS)
    return result.view(x.shape), mean, inverse


def norm_gradients(
    grad: Float[Tensor, "*batch c"],
    x: Float[Tensor, "*batch c"],
    weight: Float[Tensor, " c"],
    mean: Float[Tensor, "_ _ _"],
    inverse: Float[Tensor, "_ _ _"],
) -> tuple[Float[Tensor, "*batch c"], Float[Tensor, " c"], Float[Tensor, " c"]]:
    """The gradients of x, laid out as x is, and of weight and bias."""
    grad_x, both = _gradients(_with_four_axes(grad), _with_four_axes(x), weight, mean, inverse)
    return grad_x.view(x.shape), both[0], both[1]


def norm_again(
    grad: Float[Tensor, "*batch c"],
    x: Float[Tensor, "*batch c"],
    weight: Float[Tensor, " c"],
    bias: Float[Tensor, " c"],
) -> tuple[Float[Tensor, "*batch c"], Float[Tensor, "*batch c"], Float[Tensor, " c"], Float[Tensor, " c"]]:
    """The norm of x, contiguous, and its gradients as `norm_gradients` returns them. x is read once for both."""
    result, grad_x, both = _again(_with_four_axes(grad), _with_four_axes(x), weight, bias)
    return result.view(x.shape), grad_x.view(x.shape), both[0], both[1]


def _with_four_axes(x: Float[Tensor, "*batch c"]) -> Float[Tensor, "_ _ _ c"]:
    """A view with three axes before the channels. Up to three such axes are read without a copy, through their strides."""
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x.view(*(1,) * (4 - x.ndim), *x.shape)


def _arguments(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and constants of a launch: the tensors, all of one shape [n0, n1, n2, c], and how their positions lie.

    Positions are numbered as in a contiguous tensor of this shape. Neighbouring axes that form one axis in every tensor are
    joined, because each remaining axis costs a division.
    """
    some, *_ = tensors.values()
    *sizes, channels = some.shape
    strides = [x.stride() for x in tensors.values()]
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis in reversed(range(3)):
        of_axis = tuple(stride[axis] for stride in strides)
        if sizes[axis] == 1:
            continue
        if axes and of_axis == tuple(axes[0][0] * stride for stride in axes[0][1]):
            axes[0] = axes[0][0] * sizes[axis], axes[0][1]
        else:
            axes.insert(0, (sizes[axis], of_axis))
    axes = [(1, (0,) * len(strides))] * (3 - len(axes)) + axes
    arguments: dict[str, Any] = dict(tensors)
    for n, (name, x) in enumerate(tensors.items()):
        arguments[f"{name}_strides"] = *(of_axis[n] for _, of_axis in axes), x.stride(3)
    arguments |= {"positions": math.prod(sizes), "n1": axes[1][0], "n2": axes[2][0]}
    told_apart = next((3 - n for n, (size, _) in enumerate(axes) if size != 1), 1)
    return arguments, {"AXES": told_apart, "CHANNELS": channels, "WIDTH": next_power_of_two(max(1, channels))}


def _forward_body(
    launch: Launcher, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and inverse standard deviation of each position."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, inverse = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    arguments, constants = _arguments({"x": x})
    tile = max(1, _TILE // constants["WIDTH"])
    launch(
        Launch(
            "layer_norm.forward",
            tiles(arguments["positions"], tile),
            {
                **arguments,
                "weight": weight,
                "weight_stride": weight.stride(0),
                "bias": bias,
                "bias_stride": bias.stride(0),
                "out": out,
                "mean": mean,
                "inverse": inverse,
                "eps": eps,
            },
            {**constants, "TILE": tile},
            writes=("out", "mean", "inverse"),
        )
    )
    return out, mean, inverse


def _with_gradients(
    launch: Launcher, kernel: str, grad: Tensor, x: Tensor, weight: Tensor, more: dict[str, Any], *results: str
) -> tuple[Tensor, Tensor]:
    """Launch a kernel that computes the gradients of x, and of weight and bias as one tensor [2, c] in the dtype of the
    weight.

    `more`: further arguments of this kernel, of which it fills `results`.
    """
    grad_x = torch.empty_like(x)
    arguments, constants = _arguments({"grad": grad, "x": x, "grad_x": grad_x})
    tile = max(1, _VECTORS * _WARPS * 32 * (_VECTOR // x.element_size()) // constants["WIDTH"])
    parts = max(1, min(_PARTS, tiles(arguments["positions"], tile)))
    sums = x.new_empty((parts, 2, x.shape[-1]), dtype=torch.float32)
    launch(
        Launch(
            f"layer_norm.{kernel}",
            parts,
            {
                **arguments,
                "weight": weight,
                "weight_stride": weight.stride(0),
                "sums": sums,
                "parts": parts,
                **more,
            },
            {**constants, "TILE": tile},
            writes=("grad_x", "sums", *results),
            warps=_WARPS,
        )
    )
    return grad_x, sum_of_parts(launch, sums, weight.dtype)


def _backward_body(
    launch: Launcher, grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias as one tensor [2, c] in the dtype of the weight."""
    return _with_gradients(launch, "backward", grad, x, weight, {"mean": mean, "inverse": inverse})


def _again_body(
    launch: Launcher, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; gradients of x, and of weight and bias as one tensor [2, c] in the dtype of the weight."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    more = {"bias": bias, "bias_stride": bias.stride(0), "out": out, "eps": _EPS}
    return out, *_with_gradients(launch, "again", grad, x, weight, more, "out")


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    grad_x, both = _gradients(grad, *ctx.saved_tensors)
    return grad_x, both[0], both[1].to(ctx.dtype_of_bias), None


def _keep(inputs: Sequence[Any], output: Any) -> tuple[Tensor | None, ...]:
    x, weight, _, _ = inputs
    _, mean, inverse = output
    return x, weight, mean, inverse


def _note(ctx: Any, inputs: Sequence[Any]) -> None:
    ctx.dtype_of_bias = inputs[2].dtype


_forward = Operator(
    "layer_norm", "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)", _forward_body
)
_gradients = Operator(
    "layer_norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) -> (Tensor, Tensor)",
    _backward_body,
)
_again = Operator(
    "layer_norm_again", "(Tensor grad, Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor, Tensor)", _again_body
)
_forward.differentiate(_backward, _keep, _note)
OPERATORS = (_forward, _gradients, _again)
