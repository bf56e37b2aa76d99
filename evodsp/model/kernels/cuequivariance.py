"""Attention with a pair bias and triangle multiplication, computed by NVIDIA's package cuequivariance-torch on GPUs.

Shape legend: B batch, N rows (each attends within itself), L positions, Q of them as queries, H heads, D head width, I J the
pair axes, z channels of the pair, c of an operand of triangle multiplication (cc of both), e elements of a mask of dropout.
"""

from __future__ import annotations

from cuequivariance_torch import triangle_attention, triangle_multiplicative_update
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from evodsp.model.kernels import chunked


def biased_attention(
    projected: Float[Tensor, "B N L 4 H D"],
    keys: Float[Tensor, "B N L"],
    pair_bias: Float[Tensor, "B H Q L"],
    first: int = 0,
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention with a bias that all rows share (algorithms 7, 13 and 14). The Q positions from `first` on attend."""
    q, k, v, gate = projected.transpose(2, 4).unbind(3)  # heads before positions
    q, gate = (x.narrow(3, first, pair_bias.shape[2]) for x in (q, gate))
    present = keys[:, :, None, None, :].bool()
    o = triangle_attention(q, k, v, pair_bias.unsqueeze(1), mask=present, scale=q.shape[-1] ** -0.5)
    return (gate.sigmoid() * o).transpose(2, 3)


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
    drawn: Bool[Tensor, "B e"] | Int64[Tensor, " B"] | None = None,
    rate: float = 0.0,
    shared_dim: int = 1,
) -> Float[Tensor, "B I J z"]:
    """x plus its update, under dropout where something is `drawn` (algorithms 11 and 12)."""
    operands = weight, bias, gate_weight, gate_bias
    if not outgoing:  # the package sums a_ki b_kj, DeepMind's parameters are those of a_kj b_ki
        operands = tuple(p.unflatten(0, (2, -1)).flip(0).flatten(0, 1) for p in operands)
    names = "p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias"
    update = triangle_multiplicative_update(
        x,
        direction="outgoing" if outgoing else "incoming",
        mask=mask,
        norm_in_weight=norm_weight,
        norm_in_bias=norm_bias,
        norm_out_weight=product_norm_weight,
        norm_out_bias=product_norm_bias,
        p_out_weight=output_weight,
        p_out_bias=output_bias,
        g_out_weight=output_gate_weight,
        g_out_bias=output_gate_bias,
        **dict(zip(names, operands, strict=True)),
    )
    if drawn is None:
        return x + update
    return chunked.dropout_add(x, update, drawn, rate, (0, 0), (x.shape[1], x.shape[2]), shared_dim)
