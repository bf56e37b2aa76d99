"""Attention with a pair bias by NVIDIA's package cuequivariance-torch, on GPUs.

Shape legend: B batch, N rows (each attends within itself), H heads, Q queries, K keys, D head width.
"""

from __future__ import annotations

from cuequivariance_torch import triangle_attention
from jaxtyping import Float
from torch import Tensor


def biased_attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
    pair_bias: Float[Tensor, "B H Q K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention with a bias that all rows share (algorithms 7, 13 and 14)."""
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))  # heads before positions
    present = keys[:, :, None, None, :].bool()
    o = triangle_attention(q, k, v, pair_bias.unsqueeze(1), mask=present, scale=q.shape[-1] ** -0.5)
    return gate.sigmoid() * o.transpose(2, 3)
