"""Attention without a pair bias, computed by torch's `scaled_dot_product_attention`.

A pair bias is not supported, because torch's fused kernels take a separate bias for every row, as large as the logits. The
tensors are given with five axes, so that torch computes the formula. The fused kernels take four axes and keep the logarithm
of a row's sum, in which a mask of -1e9 is lost; their gradients are wrong for rows without any key.

Shape legend: B batch, N rows (each attends within itself), L positions, H heads, D head width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from evodsp.model.precision import mask_bias


def attention(projected: Float[Tensor, "B N L 4 H D"], keys: Float[Tensor, "B N L"]) -> Float[Tensor, "B N L H D"]:
    """Gated attention within each row (algorithm 8)."""
    bias = mask_bias(keys).to(projected.dtype)[:, :, None, None, :]
    q, k, v, gate = projected.transpose(2, 4).unbind(3)  # heads before positions
    return (gate.sigmoid() * F.scaled_dot_product_attention(q, k, v, attn_mask=bias)).transpose(2, 3)
