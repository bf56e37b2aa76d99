"""Backend `triton`: own kernels for CUDA devices, functions named as the operators that they implement.

Importing this module does not import Triton; launching a kernel does. `REPORTS` tells, for each operator of torch behind these
functions, how many grids a call launches and how many bytes they move, from the shapes of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = ["REPORTS", "attention", "dropout_add", "fused_attention", "gated_operands", "global_attention", "layer_norm"]

REPORTS: dict[str, Callable[..., tuple[int, int]]] = {
    operator.name: operator.report
    for module in (_attention, _dropout, _gated_operands, _global_attention, _layer_norm)
    for operator in module.OPERATORS
}
"""`namespace::name` of an operator -> function of its positional arguments that returns (launches, bytes moved)."""
