"""Sum over sequences of outer products, projected: out[i, j] = W vec(sum_s left[s, i] right[s, j]^T).

Before the projection, a residue pair has c x c channels (1024 in AlphaFold2), eight times as many as the pair representation.
They are computed for a few rows at a time and projected immediately; the backward pass computes them again.

Shape legend: B batch, S sequences, I J residues, c channels of an operand, z channels of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.precision import activation_dtype, wide, wide_product, without_autocast

# Numbers per chunk of outer products: a few megabytes on a CPU, enough to fill a GPU.
_CPU_CHUNK = 1 << 21
_GPU_CHUNK = 1 << 27
# Up to this many are kept for the backward pass: recomputing so few would cost more time than the memory is worth.
_KEEP = 1 << 22


def outer_product(
    left: Float[Tensor, "B S I c"], right: Float[Tensor, "B S J c"], weight: Float[Tensor, "z cc"]
) -> Float[Tensor, "B I J z"]:
    """The projected sum. `cc` is c x c; the left operand's channel varies slower. Differentiable once in all inputs."""
    # Autocast ignores products with `out=`, so the inputs are cast here.
    dtype = activation_dtype(left)
    with without_autocast(left.device):
        return _OuterProduct.apply(left.to(dtype), right.to(dtype), weight.to(dtype))


def _chunks(left: Tensor, right: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, _, rows, c = left.shape
    budget = _CPU_CHUNK if left.device.type == "cpu" else _GPU_CHUNK
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
        for sample, rows in _chunks(left, right):
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
        total = wide(left.dtype)
        grad_right = torch.zeros_like(right, memory_format=torch.contiguous_format, dtype=total)
        grad_weight = torch.zeros_like(weight, dtype=total)
        (sequences, _, c), j = left.shape[1:], right.shape[2]
        for n, (sample, rows) in enumerate(_chunks(left, right)):
            products = kept[n] if kept else _products(left[sample, :, rows], right[sample])
            upstream = grad[sample, rows].flatten(0, 1)
            grad_weight += wide_product(upstream.T, products)
            i = rows.stop - rows.start
            slope = (upstream @ weight).view(i, j, c, c).transpose(1, 2).reshape(i * c, j * c)
            grad_left[sample, :, rows] = (right[sample].flatten(1) @ slope.T).view(sequences, i, c)
            grad_right[sample] += wide_product(left[sample, :, rows].flatten(1), slope).view(sequences, j, c)
        return grad_left, grad_right.to(right.dtype), grad_weight.to(weight.dtype)
