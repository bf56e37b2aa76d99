"""A result times the sigmoid of its gate, and the gradients of both in one pass over memory.

Shape legend: * any axes; all tensors are read as vectors.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, tiles

_TILE = 2048


def gate(x: Float[Tensor, "*n"], logits: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x sigmoid(logits), computed in fp32, contiguous. It is not differentiable; `gate_gradients` is its backward step."""
    return _forward(x.contiguous(), logits.contiguous())


def gate_gradients(
    grad: Float[Tensor, "*n"], x: Float[Tensor, "*n"], logits: Float[Tensor, "*n"]
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """The gradients of x and of the logits."""
    return _gradients(grad.contiguous(), x.contiguous(), logits.contiguous())


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
_gradients = Operator("gate_backward", "(Tensor grad, Tensor x, Tensor logits) -> (Tensor, Tensor)", _backward_body)
OPERATORS = (_forward, _gradients)
