"""Attention with a pair bias, computed by NVIDIA's package cuequivariance-torch on GPUs.

Shape legend: B batch, N rows (each attends within itself), L positions, Q of them as queries, H heads,
D head width.
"""

from __future__ import annotations

from cuequivariance_torch import triangle_attention
from jaxtyping import Float
from torch import Tensor


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
