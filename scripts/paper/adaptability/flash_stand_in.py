"""`flash_attn_func` where the package flash-attn cannot run: same arguments, layout and result, by the plain formula.

The signature is that of flash_attn/flash_attn_interface.py in Dao-AILab/flash-attention, as far as this package uses it.
Shape legend: N sequences, Q queries, K keys, H heads, G heads of keys and values, D head width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def flash_attn_func(
    q: Float[Tensor, "N Q H D"],
    k: Float[Tensor, "N K G D"],
    v: Float[Tensor, "N K G D"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Float[Tensor, "N Q H D"]:
    """softmax(q k^T * scale) v. Query head h reads head h // (H / G) of the keys. Raises ValueError for dropout.

    `causal`: the last query sees all keys, the one before it all but the last, and so on.
    """
    if dropout_p:
        raise ValueError("the stand-in for flash-attn draws no random numbers; use dropout_p=0")
    shared = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    logits = torch.einsum("nqhd,nkhd->nhqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        queries, keys = logits.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
        logits = logits.masked_fill(later, -torch.inf)
    return torch.einsum("nhqk,nkhd->nqhd", logits.softmax(-1), v)
