"""Attention without a pair bias, computed by the package flash-attn (Dao et al., arXiv 2205.14135) on GPUs, in bf16 or fp16.

flash-attn takes no key mask. An additional channel carries it: 1 in every query, a large negative number in every masked key,
so that their product is the bias of the logit. Heads are padded to a multiple of 8 channels, as the package asks.

Shape legend: B batch, N rows (each attends within itself), L positions, H heads, D head width.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_func
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from evodsp.model.precision import mask_bias


def attention(projected: Float[Tensor, "B N L 4 H D"], keys: Float[Tensor, "B N L"]) -> Float[Tensor, "B N L H D"]:
    """Gated attention within each row (algorithm 8)."""
    q, k, v, gate = projected.unbind(3)
    rows, width = q.shape[:2], q.shape[-1]
    scale = width**-0.5
    bias = (mask_bias(keys) / scale).clamp(min=torch.finfo(k.dtype).min).to(k.dtype)
    q = torch.cat([q, q.new_ones(*q.shape[:-1], 1)], -1)
    k = torch.cat([k, bias[..., None, None].expand(*k.shape[:-1], 1)], -1)
    padded_width = (width // 8 + 1) * 8  # the least multiple of 8 above the width
    q, k, v = (F.pad(x, (0, padded_width - x.shape[-1])).flatten(0, 1) for x in (q, k, v))
    o = flash_attn_func(q, k, v, softmax_scale=scale)
    return gate.sigmoid() * o[..., :width].unflatten(0, rows)
