"""Attention by torch's `scaled_dot_product_attention`.

Only without a pair bias: torch's fused kernels want the bias of every row of its own, which is as large as the logits.

Shape legend: B batch, N rows (each attends within itself), H heads, Q queries, K keys, D head width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from evodsp.model.kernels.reference import mask_bias


def attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row (algorithm 8)."""
    bias = mask_bias(keys).to(q.dtype)[:, :, None, None, :]
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))  # heads before positions
    return gate.sigmoid() * F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(2, 3)
