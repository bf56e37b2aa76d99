"""Backend `triton`: evodsp's kernels for CUDA devices, in functions named after the operators that they implement.

Importing this module does not import Triton; launching a kernel does. `REPORTS` computes, for each torch operator behind
these functions, how many grids a call launches and how many bytes they move, from the shapes of its arguments.

Shape legend: B batch, N rows (each attends within itself), L positions, Q queries, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.by_chunks import Layers, Steps
from evodsp.model.kernels.by_chunks import linear as project
from evodsp.model.kernels.outer_product import OuterProducts, ProductSteps
from evodsp.model.kernels.triangle_products import Triangles
from evodsp.model.kernels.triton_kernels import attention as _attention
from evodsp.model.kernels.triton_kernels import columns as _columns
from evodsp.model.kernels.triton_kernels import dropout as _dropout
from evodsp.model.kernels.triton_kernels import gate as _gate
from evodsp.model.kernels.triton_kernels import gated_operands as _gated_operands
from evodsp.model.kernels.triton_kernels import global_attention as _global_attention
from evodsp.model.kernels.triton_kernels import hidden as _hidden
from evodsp.model.kernels.triton_kernels import layer_norm as _layer_norm
from evodsp.model.kernels.triton_kernels import outer_product as _outer_product
from evodsp.model.kernels.triton_kernels.dropout import dropout_add
from evodsp.model.kernels.triton_kernels.global_attention import global_attention
from evodsp.model.kernels.triton_kernels.launch import Operator
from evodsp.model.kernels.triton_kernels.layer_norm import layer_norm

__all__ = [
    "LAUNCHED",
    "REPORTS",
    "attention",
    "biased_attention",
    "dropout_add",
    "gated_linear",
    "gated_output",
    "gated_projection",
    "global_attention",
    "layer_norm",
    "linear",
    "outer_product",
    "pooled_projections",
    "projections",
    "transition",
    "triangle_product",
]

LAUNCHED: dict[str, Operator] = {
    operator.name: operator
    for module in (
        _attention,
        _columns,
        _dropout,
        _gate,
        _gated_operands,
        _global_attention,
        _hidden,
        _layer_norm,
        _outer_product,
    )
    for operator in module.OPERATORS
}
"""The launched operators by `namespace::name`."""
REPORTS: dict[str, Callable[..., tuple[int, int]]] = {name: operator.report for name, operator in LAUNCHED.items()}
"""`namespace::name` of an operator -> function of its positional arguments that returns (launches, bytes moved)."""


def attention(projected: Float[Tensor, "B N L 4 H D"], keys: Float[Tensor, "B N L"]) -> Float[Tensor, "B N L H D"]:
    """Gated attention within each row."""
    return _attention.attention(projected, keys)


def biased_attention(
    projected: Float[Tensor, "B N L 4 H D"],
    keys: Float[Tensor, "B N L"],
    pair_bias: Float[Tensor, "B H Q L"],
    first: int = 0,
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row, with a bias of the logits that all rows share."""
    return _attention.attention(projected, keys, pair_bias, first)


_STEPS = Steps(
    norm=_layer_norm.norm,
    norm_backward=_layer_norm.norm_gradients,
    norm_again=_layer_norm.norm_again,
    project=project,
    gated_operands=_gated_operands.operands_of_chunk,
    gated_operands_backward=_gated_operands.gradient_of_chunk,
    hidden_backward=_hidden.hidden_gradients,
    gate=_gate.gate,
    gate_backward=_gate.gate_gradients,
    column_sums=_columns.column_sums,
)
_LAYERS, _TRIANGLES = Layers(_STEPS), Triangles(_STEPS)
gated_linear = _LAYERS.gated_linear
gated_output = _TRIANGLES.gated_output
gated_projection = _TRIANGLES.gated_projection
linear = _LAYERS.linear
pooled_projections = _LAYERS.pooled_projections
projections = _LAYERS.projections
transition = _LAYERS.transition
triangle_product = _TRIANGLES.triangle_product
_PRODUCTS = ProductSteps(
    _outer_product.form, _outer_product.project, _outer_product.project_backward, gpu_products=1 << 28
)
outer_product = OuterProducts(_PRODUCTS).outer_product
