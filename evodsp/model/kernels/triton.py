"""Backend `triton`: evodsp's kernels for CUDA devices, in functions named after the operators that they implement.

Importing this module does not import Triton; launching a kernel does. `REPORTS` computes, for each torch operator behind
these functions, how many grids a call launches and how many bytes they move, from the shapes of its arguments.

Shape legend: B batch, N rows (each attends within itself), L positions, Q queries, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float, Int64
from torch import Tensor

from evodsp.model.kernels.by_chunks import Layers, Steps, cast_all
from evodsp.model.kernels.by_chunks import linear as project
from evodsp.model.kernels.products import OuterProducts, ProductSteps, Triangles, joined
from evodsp.model.kernels.triton_kernels import attention as _attention
from evodsp.model.kernels.triton_kernels import dropout as _dropout
from evodsp.model.kernels.triton_kernels import gate as _gate
from evodsp.model.kernels.triton_kernels import gated_operands as _gated_operands
from evodsp.model.kernels.triton_kernels import global_attention as _global_attention
from evodsp.model.kernels.triton_kernels import layer_norm as _layer_norm
from evodsp.model.kernels.triton_kernels import outer_product as _outer_product
from evodsp.model.kernels.triton_kernels import sums as _sums
from evodsp.model.kernels.triton_kernels import triangle as _triangle
from evodsp.model.kernels.triton_kernels.dropout import dropout_add
from evodsp.model.kernels.triton_kernels.global_attention import global_attention
from evodsp.model.kernels.triton_kernels.launch import Operator
from evodsp.model.kernels.triton_kernels.layer_norm import layer_norm
from evodsp.model.precision import without_autocast

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
    "triangle_multiplication",
]

LAUNCHED: dict[str, Operator] = {
    operator.name: operator
    for module in (
        _attention,
        _sums,
        _dropout,
        _gate,
        _gated_operands,
        _global_attention,
        _layer_norm,
        _outer_product,
        _triangle,
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
    hidden_backward=_gate.hidden_gradients,
    gate=_gate.gate,
    gate_backward=_gate.gate_gradients,
    column_sums=_sums.column_sums,
)
_LAYERS, _TRIANGLES = Layers(_STEPS), Triangles(_STEPS, dropout_add)
gated_linear = _LAYERS.gated_linear
linear = _LAYERS.linear
pooled_projections = _LAYERS.pooled_projections
projections = _LAYERS.projections
transition = _LAYERS.transition
_PRODUCTS = ProductSteps(
    _outer_product.form, _outer_product.project, _outer_product.project_backward, gpu_products=1 << 28
)
outer_product = OuterProducts(_PRODUCTS).outer_product


def gated_projection(
    x: Float[Tensor, "B I J z"],
    mask: Float[Tensor, "B I J"],
    norm_weight: Float[Tensor, " z"],
    norm_bias: Float[Tensor, " z"],
    weight: Float[Tensor, "cc z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc z"],
    gate_bias: Float[Tensor, " cc"],
) -> Float[Tensor, "2 B c I J"]:
    """Both operands of triangle multiplication, by one kernel where it fits (`triangle.fits`), otherwise by separate ones."""
    norm = norm_weight, norm_bias
    if not _triangle.fits(x, weight):
        return _TRIANGLES.gated_projection(x, mask, *norm, weight, bias, gate_weight, gate_bias)
    layers = joined(weight, gate_weight, x), joined(bias, gate_bias, x)
    with without_autocast(x.device):
        return _triangle.FusedOperands.apply(x, mask, *norm, *layers)


def gated_output(
    x: Float[Tensor, "B n1 n2 z"],
    product: Float[Tensor, "B n1 n2 c"],
    norm_weight: Float[Tensor, " z"],
    norm_bias: Float[Tensor, " z"],
    gate_weight: Float[Tensor, "z z"],
    gate_bias: Float[Tensor, " z"],
    product_norm_weight: Float[Tensor, " c"],
    product_norm_bias: Float[Tensor, " c"],
    weight: Float[Tensor, "z c"],
    bias: Float[Tensor, " z"],
    drawn: Int64[Tensor, " B"] | None = None,
    rate: float = 0.0,
    offsets: tuple[int, int] = (0, 0),
    whole: tuple[int, int] = (0, 0),
    shared_dim: Literal[1, 2] = 1,
) -> Float[Tensor, "B n1 n2 z"]:
    """x plus its update by a product that ranks exchanged, under dropout if there are keys, `drawn`: by one kernel where it
    fits (`triangle.output_fits`), otherwise by separate ones.
    """
    norm, gate = (norm_weight, norm_bias), (gate_weight, gate_bias)
    product_norm, output = (product_norm_weight, product_norm_bias), (weight, bias)
    if not _triangle.output_fits(x, product):
        parameters = *norm, *gate, *product_norm, *output
        return _TRIANGLES.gated_output(x, product, *parameters, drawn, rate, offsets, whole, shared_dim)
    _, product, *layers = cast_all(x, product, *gate, *output)
    kept = None
    if drawn is not None:
        other = 3 - shared_dim
        kept = _dropout.draw_mask(drawn, whole[other - 1] * x.shape[3], rate).unflatten(1, (-1, x.shape[3]))
        kept = kept.narrow(1, offsets[other - 1], x.shape[other]).contiguous()
    own = *norm, *layers[:2], *product_norm, *layers[2:]
    with without_autocast(x.device):
        return _triangle.FusedOutput.apply(shared_dim, 1.0 / (1.0 - rate), x, product.permute(0, 3, 1, 2), kept, *own)


def triangle_multiplication(
    x: Float[Tensor, "B I J z"],
    mask: Float[Tensor, "B I J"],
    norm_weight: Float[Tensor, " z"],
    norm_bias: Float[Tensor, " z"],
    weight: Float[Tensor, "cc z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc z"],
    gate_bias: Float[Tensor, " cc"],
    output_gate_weight: Float[Tensor, "z z"],
    output_gate_bias: Float[Tensor, " z"],
    product_norm_weight: Float[Tensor, " c"],
    product_norm_bias: Float[Tensor, " c"],
    output_weight: Float[Tensor, "z c"],
    output_bias: Float[Tensor, " z"],
    outgoing: bool,
    drawn: Int64[Tensor, " B"] | None = None,
    rate: float = 0.0,
    shared_dim: Literal[1, 2] = 1,
) -> Float[Tensor, "B I J z"]:
    """x plus its update on one device, under dropout if there are keys, `drawn`: by few kernels where they fit
    (`triangle.fits`), otherwise by separate ones.
    """
    norm, gate = (norm_weight, norm_bias), (output_gate_weight, output_gate_bias)
    product_norm, output = (product_norm_weight, product_norm_bias), (output_weight, output_bias)
    if not _triangle.fits(x, weight):
        parameters = *norm, weight, bias, gate_weight, gate_bias, *gate, *product_norm, *output
        return _TRIANGLES.triangle_multiplication(x, mask, *parameters, outgoing, drawn, rate, shared_dim)
    _, *layers = cast_all(x, *gate, *output)
    both = joined(weight, gate_weight, x), joined(bias, gate_bias, x)
    kept = None if drawn is None else _dropout.draw_mask(drawn, x.shape[3 - shared_dim] * x.shape[3], rate)
    own = *norm, *both, *layers[:2], *product_norm, *layers[2:]
    with without_autocast(x.device):
        return _triangle.FusedTriangles.apply(outgoing, shared_dim, 1.0 / (1.0 - rate), x, mask, kept, *own)
