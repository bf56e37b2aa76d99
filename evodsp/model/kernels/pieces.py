"""What operators that begin with a layer norm (`layers`, `triangles`) are made of. In `Pieces` `chunked` and `triton` differ.

Shape legend: c channels of an operand, h hidden channels, z channels of the pair representation, I J residues, P positions, *
axes of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.chunks import Chunk, ColumnSums, Sums, Whole
from evodsp.model.precision import activation_dtype


@dataclass(frozen=True)
class Pieces:
    """What operators compute between matrix products. Not differentiable: each comes with its backward pass."""

    norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(x [* c], weight, bias) -> layer norm of x, contiguous and in its dtype; mean and inverse deviation of each position. The
    parameters may be wider than x."""
    norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(gradient, x, weight, mean, inverse deviation) -> gradients of x, weight and bias."""
    norm_again: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] | None
    """(gradient, x, weight, bias) -> layer norm of x, as `norm` returns it; gradients of x, weight and bias. None where one
    pass over memory less does not pay: on a CPU, products after it find less in the caches."""
    project: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(y [* I J z], weight [4c z], bias) -> projections of y in the layout that the next two want: [* I J 4c] or [4c * I J]."""
    gated_operands: Callable[[Tensor, Tensor], Tensor]
    """(projections, mask [* I J]) -> [2 * c I J]: mask x sigmoid(second half of the channels) x first half."""
    gated_operands_backward: Callable[[Tensor, Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    """(gradient [2 * c I J], projections, mask, dtype) -> gradient of the projections as a matrix [*IJ 4c], of any strides; its
    sum over positions in this dtype."""
    hidden_backward: Callable[[Tensor, Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    """(gradient [P c], weight [c h], hidden layer [P h], dtype) -> gradient of the hidden layer before its ReLU; its sum over
    positions in this dtype."""
    gate: Callable[[Tensor, Tensor], Tensor]
    """(x, logits) -> x sigmoid(logits)."""
    gate_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(gradient, x, logits) -> gradients of x and of the logits."""
    column_sums: ColumnSums
    """Sums the gradients of biases."""

    def sums(self, chunks: Sequence[Chunk], *parameters: Tensor | None) -> Sums:
        """Sums over chunks of the gradients of these parameters."""
        return Sums(chunks, *parameters, column_sums=self.column_sums)


def cast_all(x: Tensor, *others: Any) -> list[Any]:
    """The operands in the precision of activations. Autocast does not see the products inside of a Function."""
    dtype = activation_dtype(x)
    return [None if operand is None else operand.to(dtype) for operand in (x, *others)]


def matrix(x: Tensor) -> Tensor:
    """A chunk with one row a position."""
    return x.reshape(-1, x.shape[-1])


def linear(y: Float[Tensor, "*chunk z"], weight: Tensor, bias: Tensor) -> Float[Tensor, "*chunk o"]:
    """A linear layer of the last axis."""
    return torch.addmm(bias, matrix(y), weight.T).view(*y.shape[:-1], len(weight))


def norm_backward(
    pieces: Pieces,
    sums: Sums,
    grad_x: Whole,
    at: Chunk,
    upstream: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
) -> None:
    """The gradients of x and of the norm's parameters, the first two of `sums`. `upstream`: that of the norm of x[at]."""
    put_norm(sums, grad_x, at, *pieces.norm_backward(upstream.view(x[at].shape), x[at], weight, *statistics))


def put_norm(sums: Sums, grad_x: Whole, at: Chunk, piece: Tensor, of_weight: Tensor, of_bias: Tensor) -> None:
    """Take in the gradients of x[at] and of the norm's parameters."""
    grad_x.put(at, piece)
    sums.add(0, of_weight)
    sums.add(1, of_bias)
