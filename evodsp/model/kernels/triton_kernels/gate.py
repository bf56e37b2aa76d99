"""A result times the sigmoid of its gate with the gradients of both, and the gradient of a transition's hidden layer
before its ReLU, each in one pass over memory.

The hidden layer is the widest array of a transition. Three separate operators would write its gradient twice and read it
twice before it is used. This kernel writes it once.

Kernels of gates take contiguous tensors. Strides of hidden layers: [P, c] of the gradient, [c, h] of the weight, [P, h] of the
hidden layer. Offsets are 64-bit.

Shape legend: * any axes, which are read as vectors; P positions, c channels, h hidden channels.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import (
    Launch,
    Launcher,
    Operator,
    product_precision,
    product_tile,
    tiles,
)
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts


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


_TILE = 2048


def gate(x: Float[Tensor, "*n"], logits: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x sigmoid(logits), computed in fp32, contiguous. It is not differentiable; `gate_gradients` is its backward step."""
    return _forward(x.contiguous(), logits.contiguous())


def gate_gradients(
    grad: Float[Tensor, "*n"], x: Float[Tensor, "*n"], logits: Float[Tensor, "*n"]
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """The gradients of x and of the logits."""
    return _gate_gradients(grad.contiguous(), x.contiguous(), logits.contiguous())


def _launch(launch: Launcher, kernel: str, results: dict[str, Tensor], **inputs: Tensor) -> None:
    size = inputs["x"].numel()
    launch(
        Launch(
            f"gate.{kernel}", tiles(size, _TILE), {**inputs, **results, "size": size}, {"TILE": _TILE}, tuple(results)
        )
    )


def _forward_body(launch: Launcher, x: Tensor, logits: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _launch(launch, "forward", {"out": out}, x=x, logits=logits)
    return out


def _backward_body(launch: Launcher, grad: Tensor, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_logits = torch.empty_like(x), torch.empty_like(logits)
    _launch(launch, "backward", {"grad_x": grad_x, "grad_logits": grad_logits}, grad=grad, x=x, logits=logits)
    return grad_x, grad_logits


_forward = Operator("gate", "(Tensor x, Tensor logits) -> Tensor", _forward_body)
_gate_gradients = Operator(
    "gate_backward", "(Tensor grad, Tensor x, Tensor logits) -> (Tensor, Tensor)", _backward_body
)


def hidden_gradients(
    grad: Float[Tensor, "P c"], narrow: Float[Tensor, "c h"], hidden: Float[Tensor, "P h"], dtype: torch.dtype
) -> tuple[Float[Tensor, "P h"], Float[Tensor, " h"]]:
    """grad @ narrow where `hidden`, the result of the ReLU, is positive, else 0; and its sum over positions in `dtype`. Sums
    are taken in fp32.
    """
    return _hidden_gradients(grad, narrow, hidden, dtype)


def _hidden_body(
    launch: Launcher, grad: Tensor, narrow: Tensor, hidden: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    slope = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    (positions, channels), width = grad.shape, narrow.shape[1]
    along, across = product_tile(positions, 128, grad), product_tile(width, 128, grad)
    parts = tiles(positions, along)
    make = grad.new_empty if positions else grad.new_zeros  # an empty grid fills nothing
    sums = make(max(1, parts), width, dtype=torch.float32)
    launch(
        Launch(
            "gate.hidden_backward",
            parts * tiles(width, across),
            {
                "grad": grad,
                "grad_strides": grad.stride(),
                "narrow": narrow,
                "narrow_strides": narrow.stride(),
                "hidden": hidden,
                "hidden_strides": hidden.stride(),
                "slope": slope,
                "sums": sums,
                "positions": positions,
                "channels": channels,
                "width": width,
            },
            {
                "TILE": along,
                "TILE_H": across,
                "TILE_C": product_tile(channels, 64, grad),
                "PRECISION": product_precision(),
            },
            writes=("slope", "sums"),
            warps=8,
            stages=3 if grad.element_size() < 4 else 1,
        )
    )
    return slope, sum_of_parts(launch, sums, dtype)


_hidden_gradients = Operator(
    "hidden_backward", "(Tensor grad, Tensor narrow, Tensor hidden, ScalarType dtype) -> (Tensor, Tensor)", _hidden_body
)
OPERATORS = (_forward, _gate_gradients, _hidden_gradients)
