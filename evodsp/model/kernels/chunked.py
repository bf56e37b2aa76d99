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

__all__ = ["attention", "biased_attention", "gated_projection", "layer_norm", "outer_product", "transition"]

# Numbers per chunk, of logits and of outer products: about a core's cache, or enough to fill a GPU.
_CPU_LOGITS, _GPU_LOGITS = 1 << 18, 1 << 26
_CPU_PRODUCTS, _GPU_PRODUCTS = 1 << 21, 1 << 27
# Of the hidden layer of transitions, and of projections.
_CPU_HIDDEN, _GPU_HIDDEN = 1 << 19, 1 << 27
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


def gated_projection(
    x: Float[Tensor, "B I J c_z"],
    mask: Float[Tensor, "B I J"],
    weight: Float[Tensor, "cc c_z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc c_z"],
    gate_bias: Float[Tensor, " cc"],
) -> Float[Tensor, "2 B c I J"]:
    """Both operands of triangle multiplication, channels first. Values and gates are computed again in the backward pass."""
    return _GatedProjection.apply(*_cast(x, mask, weight, bias, gate_weight, gate_bias))


def transition(
    x: Float[Tensor, "*batch c"],
    widen: Float[Tensor, "h c"],
    widen_bias: Float[Tensor, " h"],
    narrow: Float[Tensor, "c h"],
    narrow_bias: Float[Tensor, " c"],
) -> Float[Tensor, "*batch c"]:
    """Two-layer perceptron, whose hidden layer is never whole, and computed again in the backward pass."""
    return _Transition.apply(*_cast(x, widen, widen_bias, narrow, narrow_bias))


def outer_product(
    left: Float[Tensor, "B S I c"], right: Float[Tensor, "B S J c"], weight: Float[Tensor, "z cc"]
) -> Float[Tensor, "B I J z"]:
    """The projected sum of outer products (algorithm 10). Differentiable once in all inputs."""
    return _OuterProduct.apply(*_cast(left, right, weight))


def _cast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as autocast would cast them for a matrix product. It does not see the products inside of a Function."""
    device = tensors[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # the meta device has no autocast
        dtype = torch.get_autocast_dtype(device)
        return [x.to(dtype) for x in tensors]
    return list(tensors)


def _heads_first(x: Float[Tensor, "n L H D"]) -> Float[Tensor, "n H L D"]:
    return x.transpose(1, 2)


def _laid_out(x: Float[Tensor, "n L H D"], scale: float | Tensor = 1.0) -> Float[Tensor, "n H L D"]:
    """A contiguous copy, times a scale: a batched product of strided operands would copy them anyway, each time."""
    n, length, heads, width = x.shape
    return torch.mul(_heads_first(x), scale, out=x.new_empty(n, heads, length, width))


def _weights(
    q: Float[Tensor, "n H Q D"],
    k: Float[Tensor, "n H K D"],
    keys: Float[Tensor, "n K"],
    pair_bias: Float[Tensor, "H Q K"] | None,
) -> Float[Tensor, "n H Q K"]:
    """Softmax of the logits. One of q and k is scaled."""
    (n, heads, queries, _), length = q.shape, k.shape[2]
    logits = q.new_empty(n, heads, queries, length)
    masked = mask_bias(keys)[:, None, None, :]
    if pair_bias is None:
        logits.copy_(masked)
    else:
        torch.add(pair_bias, masked, out=logits)
    logits.view(-1, queries, length).baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT)
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
        kept, scale = [], q.shape[-1] ** -0.5
        for b, rows in _row_chunks(q, k.shape[2]):
            shared = None if pair_bias is None else pair_bias[b]
            weights = _weights(_laid_out(q[b, rows], scale), _laid_out(k[b, rows]), keys[b, rows], shared)
            attended = _heads_first(weights @ _laid_out(v[b, rows]))
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
            scaled_q, scaled_k = _laid_out(q[b, rows], scale), _laid_out(k[b, rows], scale)
            weights = kept[n] if kept else _weights(scaled_q, _laid_out(k[b, rows]), keys[b, rows], shared)
            opening = gate[b, rows].sigmoid()
            # The backward of softmax needs the sum over keys of weight x gradient, which is that of output x gradient.
            gated = grad[b, rows] * out[b, rows]
            centre = _heads_first(gated.sum(-1, keepdim=True))
            torch.mul(gated, 1.0 - opening, out=grad_gate[b, rows])
            upstream = _laid_out(grad[b, rows], _heads_first(opening))
            _heads_first(grad_v[b, rows]).copy_(weights.mT @ upstream)
            slope = (upstream @ _laid_out(v[b, rows]).mT).sub_(centre).mul_(weights)
            if grad_bias is not None:
                grad_bias[b] += slope.sum(0)
            _heads_first(grad_q[b, rows]).copy_(slope @ scaled_k)
            _heads_first(grad_k[b, rows]).copy_(slope.mT @ scaled_q)
        return grad_q, grad_k, grad_v, grad_gate, None, grad_bias


def _position_chunks(positions: int, channels: int, device: torch.device) -> Iterator[slice]:
    """Yields the positions of each chunk, for an intermediate with so many channels."""
    step = max(1, (_CPU_HIDDEN if device.type == "cpu" else _GPU_HIDDEN) // max(1, channels))
    for start in range(0, positions, step):
        yield slice(start, min(start + step, positions))


def _sums(*tensors: Tensor) -> list[Tensor]:
    """Zeros, in fp32 at least, for gradients of parameters that are summed over chunks."""
    return [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b"""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widen: Tensor, widen_bias: Tensor, narrow: Tensor, narrow_bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, widen, widen_bias, narrow, narrow_bias)
        flat = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(flat)
        for at in _position_chunks(len(flat), len(widen), x.device):
            hidden = torch.addmm(widen_bias, flat[at], widen.T).relu_()
            torch.addmm(narrow_bias, hidden, narrow.T, out=out[at])
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, *parameters = ctx.saved_tensors
        widen, widen_bias, narrow, _ = parameters
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        grad_x = torch.empty_like(flat)
        sums = to_widen, to_widen_bias, to_narrow, to_narrow_bias = _sums(*parameters)
        for at in _position_chunks(len(flat), len(widen), x.device):
            hidden = torch.addmm(widen_bias, flat[at], widen.T).relu_()
            _add_product(to_narrow, grad[at].T, hidden)
            slope = torch.ops.aten.threshold_backward(grad[at] @ narrow, hidden, 0)
            _add_product(to_widen, slope.T, flat[at])
            to_widen_bias += slope.sum(0)
            torch.matmul(slope, widen, out=grad_x[at])
        to_narrow_bias += grad.sum(0)
        return grad_x.view(x.shape), *(x.to(p.dtype) for x, p in zip(sums, parameters, strict=True))


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, gate_weight: Tensor, gate_bias: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, mask, weight, bias, gate_weight, gate_bias)
        (b, i, j, _), channels = x.shape, len(weight)
        out = x.new_empty(2, b, channels // 2, i, j)
        for sample in range(b):
            for rows in _position_chunks(i, j * channels, x.device):
                flat = x[sample, rows].flatten(0, 1)
                gated = torch.addmm(gate_bias, flat, gate_weight.T).sigmoid_()
                gated *= torch.addmm(bias, flat, weight.T)
                torch.mul(_operands(gated, rows, j), mask[sample, rows], out=out[:, sample, :, rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, weight, bias, gate_weight, gate_bias = ctx.saved_tensors
        (b, i, j, _), channels = x.shape, len(weight)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        parameters = weight, bias, gate_weight, gate_bias
        sums = to_weight, to_bias, to_gate_weight, to_gate_bias = _sums(*parameters)
        for sample in range(b):
            for rows in _position_chunks(i, j * channels, x.device):
                flat = x[sample, rows].flatten(0, 1)
                values = torch.addmm(bias, flat, weight.T)
                opening = torch.addmm(gate_bias, flat, gate_weight.T).sigmoid_()
                upstream = torch.empty_like(values)
                torch.mul(grad[:, sample, :, rows], mask[sample, rows], out=_operands(upstream, rows, j))
                upstream *= opening  # the gradient of the values
                _add_product(to_weight, upstream.T, flat)
                to_bias += upstream.sum(0)
                own = grad_x[sample, rows].flatten(0, 1)
                torch.matmul(upstream, weight, out=own)
                # sigmoid' = sigmoid (1 - sigmoid), and `upstream` holds the first factor.
                slope = values.mul_(upstream).mul_(1.0 - opening)
                _add_product(to_gate_weight, slope.T, flat)
                to_gate_bias += slope.sum(0)
                own.addmm_(slope, gate_weight)
        return grad_x, None, *(x.to(p.dtype) for x, p in zip(sums, parameters, strict=True))


def _operands(x: Float[Tensor, "iJ cc"], rows: slice, columns: int) -> Float[Tensor, "2 c i J"]:
    """A view of some rows, with both operands' channels in front."""
    return x.view(rows.stop - rows.start, columns, 2, x.shape[-1] // 2).permute(2, 3, 0, 1)


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
