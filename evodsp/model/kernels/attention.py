"""Attention with additive biases: softmax(q k^T / sqrt(D) + bias + mask) v.

The logits are by far the largest array of an Evoformer block ([S, H, R, R] and [R, H, R, R]), so they are never whole: a few
rows of the outer axis are processed at a time, and the backward pass recomputes the weights instead of keeping them. On a CPU
the working set stays in cache; on every device, memory is linear in the inputs and the bias. Logits, softmax and its gradient
are in float32 at least (`evodsp.model.precision`).

Shape legend: B batch, N rows of the outer axis (each attends within itself), H heads, Q queries, K keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.precision import wide, wide_product, without_autocast

# Logits per chunk: about a core's cache, or enough to fill a GPU.
_CPU_CHUNK = 1 << 18
_GPU_CHUNK = 1 << 26
# Up to this many weights are kept for the backward pass: recomputing so few would cost more time than the memory is worth.
_KEEP = 1 << 22


def attention(
    q: Float[Tensor, "B N H Q D"],
    k: Float[Tensor, "B N H K D"],
    v: Float[Tensor, "B N H K D"],
    mask_bias: Float[Tensor, "B N K"],
    pair_bias: Float[Tensor, "B H Q K"] | None = None,
) -> Float[Tensor, "B N H Q D"]:
    """Attention within each row.

    `mask_bias`: added to the logits of a row's keys; gets no gradient. `pair_bias`: shared by all rows of a sample.
    Differentiable once in q, k, v and `pair_bias`.
    """
    with without_autocast(q.device):
        return _Attention.apply(q, k, v, mask_bias, pair_bias)


def _weights(
    q: Float[Tensor, "n H Q D"],
    k: Float[Tensor, "n H K D"],
    mask_bias: Float[Tensor, "n K"],
    pair_bias: Float[Tensor, "H Q K"] | None,
) -> Float[Tensor, "n H Q K"]:
    logits = wide_product(q, k.mT)
    keys = mask_bias[:, None, None, :].to(logits.dtype)
    # The scale is applied here, because scaled queries in half precision would be rounded again.
    if pair_bias is None:
        torch.add(keys, logits, alpha=q.shape[-1] ** -0.5, out=logits)
    else:
        torch.add(pair_bias.to(logits.dtype), logits, alpha=q.shape[-1] ** -0.5, out=logits).add_(keys)
    return logits.softmax(-1)


def _chunks(q: Float[Tensor, "B N H Q D"], keys: int) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, rows, heads, queries, _ = q.shape
    budget = _CPU_CHUNK if q.device.type == "cpu" else _GPU_CHUNK
    step = max(1, budget // max(1, heads * queries * keys))
    for sample in range(batch):
        for start in range(0, rows, step):
            yield sample, slice(start, start + step)


class _Attention(torch.autograd.Function):
    """Attention whose backward pass recomputes the weights, unless they are few enough to keep."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor | None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        keep = any(ctx.needs_input_grad) and q[..., 0].numel() * k.shape[-2] <= _KEEP
        kept = []
        for b, rows in _chunks(q, k.shape[-2]):
            shared = None if pair_bias is None else pair_bias[b]
            weights = _weights(q[b, rows], k[b, rows], mask_bias[b, rows], shared)
            out[b, rows] = wide_product(weights, v[b, rows])
            if keep:
                kept.append(weights)
        ctx.save_for_backward(q, k, v, mask_bias, pair_bias, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask_bias, pair_bias, *kept = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        grad_bias = None if pair_bias is None else torch.zeros_like(pair_bias, dtype=wide(pair_bias.dtype))
        scale = q.shape[-1] ** -0.5
        for n, (b, rows) in enumerate(_chunks(q, k.shape[-2])):
            shared = None if pair_bias is None else pair_bias[b]
            weights = kept[n] if kept else _weights(q[b, rows], k[b, rows], mask_bias[b, rows], shared)
            upstream = grad[b, rows]
            grad_v[b, rows] = wide_product(weights.mT, upstream)
            # The sum over keys of weight x gradient is subtracted in here. Output x gradient, which equals it, would bring in
            # the rounding of the output.
            slope = torch._softmax_backward_data(wide_product(upstream, v[b, rows].mT), weights, -1, weights.dtype)
            if grad_bias is not None:
                grad_bias[b] += slope.sum(0)
            grad_q[b, rows] = wide_product(slope, k[b, rows]).mul_(scale)
            grad_k[b, rows] = wide_product(slope.mT, q[b, rows]).mul_(scale)
        return grad_q, grad_k, grad_v, None, None if grad_bias is None else grad_bias.to(pair_bias.dtype)
