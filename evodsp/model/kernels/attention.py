"""Attention with additive biases.

Shape legend: * any batch axes, H heads, Q queries, K keys, D head width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def attention(
    q: Float[Tensor, "*batch H Q D"],
    k: Float[Tensor, "*batch H K D"],
    v: Float[Tensor, "*batch H K E"],
    *biases: Float[Tensor, "..."],
) -> Float[Tensor, "*batch H Q E"]:
    """softmax(q k^T / sqrt(D) + biases) v. Each bias broadcasts against [*batch, H, Q, K].

    The biases are added one by one in place: summing them first would materialise their broadcast product, which for MSA
    row attention (a bias per pair, a mask per sequence) is as large as the logits themselves.
    """
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    for bias in biases:
        logits += bias
    return logits.softmax(-1) @ v
