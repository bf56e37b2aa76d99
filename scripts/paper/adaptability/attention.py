"""Attention along one dimension of [B, T, S, C]: with any kernel, with shared heads of keys and values, and to a context.

Multi-query attention is Shazeer's (arXiv 1911.02150), grouped-query attention that of Ainslie et al. (2305.13245), the
flash kernels those of torch and of the package flash-attn (Dao et al., 2205.14135).

Shape legend: B batch, T time, S space, C channels, N sequences, Q queries, K keys, L positions of the context, H heads, G heads
of keys and values, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import flash_stand_in

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = flash_stand_in.flash_attn_func

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [N, Q, H, D] to keys and values [N, K, G, D]; the result is [N, Q, H, D]."""


def sdpa(
    q: Float[Tensor, "N Q H D"], k: Float[Tensor, "N K G D"], v: Float[Tensor, "N K G D"]
) -> Float[Tensor, "N Q H D"]:
    """torch's attention, with the kernel that it chooses."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def fused(
    q: Float[Tensor, "N Q H D"], k: Float[Tensor, "N K G D"], v: Float[Tensor, "N K G D"]
) -> Float[Tensor, "N Q H D"]:
    """torch's attention with its flash kernel, or an error if that cannot run."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v)


def flash(
    q: Float[Tensor, "N Q H D"], k: Float[Tensor, "N K G D"], v: Float[Tensor, "N K G D"]
) -> Float[Tensor, "N Q H D"]:
    """flash-attn's kernel on a GPU that has the package, a stand-in elsewhere.

    The kernel refuses a batch without sequences (csrc/flash_attn/flash_api.cpp), which a rank has if an axis has fewer
    positions than there are ranks.
    """
    use = flash_attn_func if q.is_cuda and len(q) else flash_stand_in.flash_attn_func
    return use(q, k, v)


class Attention(nn.Module):
    """Self-attention. `key_heads`: how many heads the keys and values have (1: multi-query); None: as many as the queries."""

    def __init__(self, width: int, heads: int, dim: int, key_heads: int | None = None, kernel: Kernel = sdpa) -> None:
        super().__init__()
        self.heads, self.dim, self.key_heads, self.kernel = heads, dim, key_heads or heads, kernel
        self.queries = nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * self.key_heads * (width // heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "B T S C"]) -> Float[Tensor, "B T S C"]:
        sequences = x.movedim(self.dim, -2)
        q = _with_heads(self.queries(sequences), self.heads)
        k, v = (_with_heads(y, self.key_heads) for y in self.keys_values(sequences).chunk(2, -1))
        return self.out(self.kernel(q, k, v).reshape(sequences.shape)).movedim(-2, self.dim)


class CrossAttention(nn.Module):
    """Attention of the positions along one dimension to a context: the same for all of them, or one for each moment."""

    def __init__(self, width: int, heads: int, dim: int, kernel: Kernel = sdpa) -> None:
        super().__init__()
        self.heads, self.dim, self.kernel = heads, dim, kernel
        self.queries, self.keys_values = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Float[Tensor, "B T S C"], context: Float[Tensor, "B L C"] | Float[Tensor, "B T L C"]
    ) -> Float[Tensor, "B T S C"]:
        sequences = x.movedim(self.dim, -2)
        if context.ndim == 3:
            context = context.unsqueeze(1)
        context = context.expand(-1, sequences.shape[1], -1, -1)
        q = _with_heads(self.queries(sequences), self.heads)
        k, v = (_with_heads(y, self.heads) for y in self.keys_values(context).chunk(2, -1))
        return self.out(self.kernel(q, k, v).reshape(sequences.shape)).movedim(-2, self.dim)


def _with_heads(x: Float[Tensor, "B R Q C"], heads: int) -> Float[Tensor, "N Q H D"]:
    """Sequences [B, R] in one dimension, and channels in heads."""
    return x.flatten(0, 1).unflatten(-1, (heads, x.shape[-1] // heads))
