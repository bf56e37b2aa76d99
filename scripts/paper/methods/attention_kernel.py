"""Attention to a part of the keys, with what is needed to merge parts: the logarithm of each row's sum of exponentials.

These are the kernels of `F.scaled_dot_product_attention`, which does not return that logarithm. torch's own ring attention
calls them too (pytorch/pytorch, torch/distributed/tensor/experimental/_attention.py). On a GPU in full precision the formula is
computed as it stands. Shapes: rows of L queries and K keys, h heads.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

aten = torch.ops.aten


def attend(
    q: Float[Tensor, "rows h L d"], k: Float[Tensor, "rows h K d"], v: Float[Tensor, "rows h K d"]
) -> tuple[Float[Tensor, "rows h L d"], Float[Tensor, "rows h L"]]:
    """The attention's output, and log(sum over keys of exp(score)), in fp32 for inputs of half precision."""
    if _fused_on_gpu(q):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
        return out, lse
    if q.device.type in ("cpu", "meta"):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return attend_formula(q, k, v)


def attend_backward(
    gradient: Float[Tensor, "rows h L d"],
    q: Float[Tensor, "rows h L d"],
    k: Float[Tensor, "rows h K d"],
    v: Float[Tensor, "rows h K d"],
    out: Float[Tensor, "rows h L d"],
    lse: Float[Tensor, "rows h L"],
) -> tuple[Float[Tensor, "rows h L d"], Float[Tensor, "rows h K d"], Float[Tensor, "rows h K d"]]:
    """Gradients of q, k and v through a part of the keys. `out`, `lse`, `gradient`: of the attention to all keys."""
    if _fused_on_gpu(q):
        no_random = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty((), dtype=torch.uint64, device=q.device),
        )
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, False, *no_random
        )
    if q.device.type in ("cpu", "meta"):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, k, v, out, lse, 0.0, False)
    return attend_formula_backward(gradient, q, k, v, out, lse)


def attend_formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` in matrix products."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend_formula_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` in matrix products."""
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.mT * scale - lse[..., None]).exp()
    to_scores = weights * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)) * scale
    return to_scores @ k, to_scores.mT @ q, weights.mT @ gradient


def _fused_on_gpu(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)
