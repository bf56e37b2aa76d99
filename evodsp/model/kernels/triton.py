"""Backend `triton`: own kernels for CUDA devices, functions named as the operators that they implement.

Importing this module does not import Triton; launching a kernel does. `REPORTS` tells, for each operator of torch behind these
functions, how many grids a call launches and how many bytes they move, from the shapes of its arguments.

Shape legend: B batch, N rows (each attends within itself), H heads, Q queries, K keys, D head width, I J residues of a pair, c
channels of an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from evodsp.model.kernels.triton_kernels import attention as _attention
from evodsp.model.kernels.triton_kernels import dropout as _dropout
from evodsp.model.kernels.triton_kernels import gated_operands as _gated_operands
from evodsp.model.kernels.triton_kernels import global_attention as _global_attention
from evodsp.model.kernels.triton_kernels import layer_norm as _layer_norm
from evodsp.model.kernels.triton_kernels.attention import attention, fused_attention
from evodsp.model.kernels.triton_kernels.dropout import dropout_add
from evodsp.model.kernels.triton_kernels.gated_operands import gated_operands
from evodsp.model.kernels.triton_kernels.global_attention import global_attention
from evodsp.model.kernels.triton_kernels.layer_norm import layer_norm
from evodsp.model.precision import activation_dtype, without_autocast

__all__ = [
    "REPORTS",
    "attention",
    "biased_attention",
    "dropout_add",
    "fused_attention",
    "gated_operands",
    "gated_projection",
    "global_attention",
    "layer_norm",
]

REPORTS: dict[str, Callable[..., tuple[int, int]]] = {
    operator.name: operator.report
    for module in (_attention, _dropout, _gated_operands, _global_attention, _layer_norm)
    for operator in module.OPERATORS
}
"""`namespace::name` of an operator -> function of its positional arguments that returns (launches, bytes moved)."""


def biased_attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
    pair_bias: Float[Tensor, "B H Q K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row, with a bias of the logits that all rows share."""
    return attention(q, k, v, gate, keys, pair_bias)


def gated_projection(
    x: Float[Tensor, "B I J c_z"],
    mask: Float[Tensor, "B I J"],
    weight: Float[Tensor, "cc c_z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc c_z"],
    gate_bias: Float[Tensor, " cc"],
) -> Float[Tensor, "2 B c I J"]:
    """Both operands of triangle multiplication. Keeps its inputs; the projections are computed again in the backward pass."""
    dtype = activation_dtype(x)
    with without_autocast(x.device):
        return _GatedProjection.apply(*(t.to(dtype) for t in (x, mask, weight, bias, gate_weight, gate_bias)))


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _projected(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, *parameters = (t.detach() for t in ctx.saved_tensors)
        wanted = [x.requires_grad_(), *(p.requires_grad_() for p in parameters)]
        with torch.enable_grad():
            grad_x, *grad_parameters = torch.autograd.grad(_projected(x, mask, *parameters), wanted, grad)
        return grad_x, None, *grad_parameters


def _projected(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, gate_weight: Tensor, gate_bias: Tensor) -> Tensor:
    return gated_operands(F.linear(x, weight, bias), F.linear(x, gate_weight, gate_bias), mask)
