"""Operators computed a few rows at a time, whose large intermediates are never whole: the default on every device but GPUs.

The logits of attention are by far the largest array of an Evoformer block ([S, H, R, R] and [R, H, R, R]). The outer products
before their projection are the second largest: a residue pair has c x c channels (1024 in AlphaFold2), eight times as many as
the pair representation. Both are computed, used and dropped chunk by chunk, and computed again in the backward pass. On a CPU
the working set stays in cache; on every device, memory is linear in the inputs and the bias.

Shape legend: B batch, N rows of the outer axis (each attends within itself), H heads, Q queries, K keys, D head width, S
sequences, I J residues, c channels of an operand, z channels of the result; n, i: a chunk of N, of I.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.kernels.reference import layer_norm, mask_bias

__all__ = ["attention", "biased_attention", "gated_operands", "layer_norm", "outer_product"]

# Numbers per chunk, of logits and of outer products: about a core's cache, or enough to fill a GPU.
_CPU_LOGITS, _GPU_LOGITS = 1 << 18, 1 << 26
_CPU_PRODUCTS, _GPU_PRODUCTS = 1 << 21, 1 << 27
# Up to this many logits or products are kept for the backward pass: recomputing so few would cost more time than the memory is
# worth.
_KEEP = 1 << 22


def attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row (algorithm 8). Differentiable once in all inputs but `keys`."""
    return _Attention.apply(q, k, v, gate, keys, None)


def biased_attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
    pair_bias: Float[Tensor, "B H Q K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention with a bias that all rows share (algorithms 7, 13, 14). Differentiable once in all inputs but `keys`."""
    return _Attention.apply(q, k, v, gate, keys, pair_bias)


def gated_operands(
    values: Float[Tensor, "B I J cc"], gates: Float[Tensor, "B I J cc"], mask: Float[Tensor, "B I J"]
) -> Float[Tensor, "2 B c I J"]:
    """Both operands of triangle multiplication, channels first. Only the inputs are kept for the backward pass."""
    return _GatedOperands.apply(values, gates, mask)


def outer_product(
    left: Float[Tensor, "B S I c"], right: Float[Tensor, "B S J c"], weight: Float[Tensor, "z cc"]
) -> Float[Tensor, "B I J z"]:
    """The projected sum of outer products (algorithm 10). Differentiable once in all inputs."""
    device = left.device.type
    # Autocast ignores products with `out=`, so the inputs are cast here. The meta device has no autocast.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        left, right, weight = left.to(dtype), right.to(dtype), weight.to(dtype)
    return _OuterProduct.apply(left, right, weight)


def _heads_first(x: Float[Tensor, "n L H D"]) -> Float[Tensor, "n H L D"]:
    return x.transpose(1, 2)


def _weights(
    q: Float[Tensor, "n H Q D"],
    k: Float[Tensor, "n H K D"],
    keys: Float[Tensor, "n K"],
    pair_bias: Float[Tensor, "H Q K"] | None,
) -> Float[Tensor, "n H Q K"]:
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    if pair_bias is not None:
        logits += pair_bias
    logits += mask_bias(keys)[:, None, None, :]
    # Explicit dtype: a GPU's autocast would widen the weights but not the values.
    return logits.softmax(-1, dtype=logits.dtype)


def _row_chunks(q: Float[Tensor, "B N Q H D"], keys: int) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, rows, queries, heads, _ = q.shape
    budget = _CPU_LOGITS if q.device.type == "cpu" else _GPU_LOGITS
    step = max(1, budget // max(1, heads * queries * keys))
    for sample in range(batch):
        for start in range(0, rows, step):
            yield sample, slice(start, start + step)


class _Attention(torch.autograd.Function):
    """Attention whose backward pass recomputes the weights, unless they are few enough to keep."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keys: Tensor, pair_bias: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(
            gate
        )  # with the order of the gate's strides, so that the caller's transposition is undone
        keep = any(ctx.needs_input_grad) and q[..., 0].numel() * k.shape[2] <= _KEEP
        kept = []
        for b, rows in _row_chunks(q, k.shape[2]):
            shared = None if pair_bias is None else pair_bias[b]
            weights = _weights(_heads_first(q[b, rows]), _heads_first(k[b, rows]), keys[b, rows], shared)
            attended = _heads_first(weights @ _heads_first(v[b, rows]))
            torch.mul(attended, gate[b, rows].sigmoid(), out=out[b, rows])
            if keep:
                kept.append(weights)
        ctx.save_for_backward(q, k, v, gate, keys, pair_bias, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gate, keys, pair_bias, out, *kept = ctx.saved_tensors
        # Gradients of the three parts of a fused projection lie side by side, as the parts do.
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_gate = torch.empty_like(gate)
        grad_bias = None if pair_bias is None else torch.zeros_like(pair_bias)
        scale = q.shape[-1] ** -0.5
        for n, (b, rows) in enumerate(_row_chunks(q, k.shape[2])):
            shared = None if pair_bias is None else pair_bias[b]
            q_, k_, v_ = (_heads_first(x[b, rows]) for x in (q, k, v))
            weights = kept[n] if kept else _weights(q_, k_, keys[b, rows], shared)
            opening = gate[b, rows].sigmoid()
            # The backward of softmax needs the sum over keys of weight x gradient, which is that of output x gradient.
            gated = grad[b, rows] * out[b, rows]
            centre = _heads_first(gated.sum(-1, keepdim=True))
            torch.mul(gated, 1.0 - opening, out=grad_gate[b, rows])
            upstream = _heads_first(grad[b, rows] * opening)
            _heads_first(grad_v[b, rows]).copy_(weights.mT @ upstream)
            slope = (upstream @ v_.mT).sub_(centre).mul_(weights)
            if grad_bias is not None:
                grad_bias[b] += slope.sum(0)
            _heads_first(grad_q[b, rows]).copy_((slope @ k_).mul_(scale))
            _heads_first(grad_k[b, rows]).copy_((slope.mT @ q_).mul_(scale))
        return grad_q, grad_k, grad_v, grad_gate, None, grad_bias


class _GatedOperands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(values, gates, mask)
        b, i, j, channels = values.shape
        out = values.new_empty(2, b, channels // 2, i, j)
        return torch.mul(_operands(gates.sigmoid().mul_(values)), mask.unsqueeze(1), out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        values, gates, mask = ctx.saved_tensors
        upstream = torch.empty_like(values)
        torch.mul(grad, mask.unsqueeze(1), out=_operands(upstream))
        opening = gates.sigmoid()
        grad_values = upstream * opening
        # d sigmoid = sigmoid (1 - sigmoid)
        return grad_values, upstream.mul_(values).mul_(opening).mul_(1.0 - opening), None


def _operands(x: Float[Tensor, "B I J cc"]) -> Float[Tensor, "2 B c I J"]:
    """A view with both operands' channels in front."""
    return x.unflatten(-1, (2, x.shape[-1] // 2)).permute(3, 0, 4, 1, 2)


def _product_chunks(left: Tensor, right: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, _, rows, c = left.shape
    budget = _CPU_PRODUCTS if left.device.type == "cpu" else _GPU_PRODUCTS
    step = max(1, budget // max(1, right.shape[2] * c * c))
    for sample in range(batch):
        for start in range(0, rows, step):
            yield sample, slice(start, min(start + step, rows))


def _products(left: Float[Tensor, "S i c"], right: Float[Tensor, "S J c"]) -> Float[Tensor, "ij cc"]:
    """Outer products of a few rows with all columns, summed over sequences."""
    (_, i, c), j = left.shape, right.shape[1]
    products = left.flatten(1).T @ right.flatten(1)  # [i c, J c]: one matrix product over the sequences
    return products.view(i, c, j, c).transpose(1, 2).reshape(i * j, c * c)


class _OuterProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        (b, _, i, c), j = left.shape, right.shape[2]
        out = left.new_empty(b, i, j, len(weight))
        keep = any(ctx.needs_input_grad) and b * i * j * c * c <= _KEEP
        kept = []
        for sample, rows in _product_chunks(left, right):
            products = _products(left[sample, :, rows], right[sample])
            torch.matmul(products, weight.T, out=out[sample, rows].view(-1, len(weight)))
            if keep:
                kept.append(products)
        ctx.save_for_backward(left, right, weight, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right, weight, *kept = ctx.saved_tensors
        grad_left = torch.empty_like(left, memory_format=torch.contiguous_format)
        # Accumulate over chunks in fp32 at least, not in bf16.
        total = torch.promote_types(left.dtype, torch.float32)
        grad_right = torch.zeros_like(right, memory_format=torch.contiguous_format, dtype=total)
        grad_weight = torch.zeros_like(weight, dtype=total)
        (sequences, _, c), j = left.shape[1:], right.shape[2]
        for n, (sample, rows) in enumerate(_product_chunks(left, right)):
            products = kept[n] if kept else _products(left[sample, :, rows], right[sample])
            upstream = grad[sample, rows].flatten(0, 1)
            grad_weight += upstream.T @ products
            i = rows.stop - rows.start
            slope = (upstream @ weight).view(i, j, c, c).transpose(1, 2).reshape(i * c, j * c)
            grad_left[sample, :, rows] = (right[sample].flatten(1) @ slope.T).view(sequences, i, c)
            grad_right[sample] += (left[sample, :, rows].flatten(1) @ slope).view(sequences, j, c)
        return grad_left, grad_right.to(right.dtype), grad_weight.to(weight.dtype)
