"""A result times the sigmoid of its gate with the gradients of both, and the gradient of a transition's hidden layer
before its ReLU, each in one pass over memory.

The hidden layer is the widest array of a transition. Three separate operators would write its gradient twice and read it
twice before it is used. This kernel writes it once.

Shape legend: * any axes, which are read as vectors; P positions, c channels, h hidden channels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import (
    Launch,
    Launcher,
    Operator,
    product_precision,
    product_tile,
    tiles,
)
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts

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
