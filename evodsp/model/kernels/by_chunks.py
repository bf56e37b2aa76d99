"""What operators share that compute a large intermediate a few rows at a time.

It says which rows are computed at a time, how results and gradients of all chunks come together, and in which steps backends
differ.

Where everything is one chunk, its results and gradients are used as they are: no zeros, no sums, no copies into a whole.

Shape legend: B batch, n1 n2 axes of a shard of a representation, c channels of an operand, h hidden channels, z channels of the
pair representation, I J residues, P positions, * axes of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.precision import activation_dtype, wide, wide_product

# Numbers per chunk of an intermediate: about a core's cache, or enough to fill a GPU.
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 20, 1 << 28

Chunk = tuple[int | slice, slice]
"""What indexes the first two axes of a representation: (sample, rows), or everything."""
EVERYTHING: Chunk = (slice(None), slice(None))


def chunks_of(x: Float[Tensor, "B n1 n2 c"], channels: int) -> list[Chunk]:
    """The chunks in which an intermediate with so many channels is computed."""
    batch, rows, columns, _ = x.shape
    budget = _CPU_NUMBERS if x.device.type == "cpu" else _GPU_NUMBERS
    if batch * rows * columns * channels <= budget:
        return [EVERYTHING]
    step = max(1, budget // max(1, columns * channels))
    return [
        (sample, slice(start, min(start + step, rows))) for sample in range(batch) for start in range(0, rows, step)
    ]


def keeps(x: Float[Tensor, "B n1 n2 c"], channels: int, limit: int) -> bool:
    """Whether an intermediate with so many channels is kept for the backward pass: on a CPU, up to `limit` numbers."""
    return x.device.type == "cpu" and x[..., 0].numel() * channels <= limit


def returned(x: Tensor) -> Tensor:
    """x, as the forward pass of an autograd.Function returns it: compiled, it is a tensor object of its own.

    torch.compile makes every intermediate tensor of such a forward pass a result. If one is the very object that is returned
    (operations in place and `contiguous` with nothing to do give one object two names), torch 2.11 takes the gradient of that
    result, which is zero, instead of the returned one's, and says nothing.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x


class Whole:
    """A tensor that is computed chunk by chunk."""

    def __init__(self, chunks: Sequence[Chunk], make: Callable[[], Tensor]) -> None:
        """`make`: an empty tensor of the right size; not called if there is only one chunk, which then is the whole."""
        self._single = len(chunks) == 1
        if not self._single:
            self.x = make()

    def put(self, at: tuple[Any, ...], piece: Tensor) -> None:
        """Set the part `at`."""
        if self._single:
            self.x = piece
        else:
            self.x[at] = piece


class SampleSums:
    """A sum over the rows of each sample, in float32 at least, whose terms are computed chunk by chunk."""

    def __init__(self, chunks: Sequence[Chunk], make: Callable[[], Tensor]) -> None:
        """`make`: zeros of the right size; not called if there is only one chunk."""
        self._single = len(chunks) == 1
        if not self._single:
            self.x = make()

    def add(self, at: Chunk, piece: Tensor) -> None:
        """Add a chunk's sum."""
        if self._single:
            self.x = piece
        else:
            self.x[at[0]] += piece


ColumnSums = Callable[[Tensor, torch.dtype], Tensor]
"""(matrix [P c], whose rows may be apart in memory; dtype) -> sum of all rows in this dtype."""


def column_sums(x: Float[Tensor, "P c"], dtype: torch.dtype) -> Float[Tensor, " c"]:
    """The sum of all rows, as torch computes it."""
    return x.sum(0, dtype=dtype)


class Sums:
    """Gradients of parameters, summed over chunks in float32 at least. A single chunk's are rounded by its product."""

    def __init__(
        self, chunks: Sequence[Chunk], *parameters: Tensor | None, column_sums: ColumnSums = column_sums
    ) -> None:
        """`column_sums`: what sums the gradients of biases."""
        self._parameters, self._several = parameters, len(chunks) > 1
        self._column_sums = column_sums
        self._totals: list[Tensor | None] = [None] * len(parameters)

    def dtype(self, number: int) -> torch.dtype:
        """Precision that pieces of one parameter's gradient need: a single one is rounded to the parameter's."""
        parameter = self._parameters[number]
        assert parameter is not None
        return wide(parameter.dtype) if self._several else parameter.dtype

    def add(self, number: int, piece: Tensor) -> None:
        """Add to the gradient of one parameter."""
        total = self._totals[number]
        if total is None:
            self._totals[number] = piece.to(wide(piece.dtype)) if self._several else piece
        else:
            total += piece

    def add_linear(self, weight: int, gradient: Tensor, x: Tensor, bias: int | None = None) -> None:
        """Add to the gradients of a linear layer. `gradient`: of its result, `x`: its input, a position in each row."""
        total = self._totals[weight]
        if total is not None and total.dtype == x.dtype:
            total.addmm_(gradient.T, x)
        else:
            self.add(weight, wide_product(gradient.T, x) if self._several else gradient.T @ x)
        if bias is not None and (parameter := self._parameters[bias]) is not None:
            own = gradient[:, -len(parameter) :]
            self.add(bias, self._column_sums(own, wide(own.dtype) if self._several else own.dtype))

    def results(self) -> list[Any]:
        """The gradients; None of what is no parameter, or got none."""
        pairs = zip(self._totals, self._parameters, strict=True)
        return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]


@dataclass(frozen=True)
class Steps:
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
    steps: Steps,
    sums: Sums,
    grad_x: Whole,
    at: Chunk,
    upstream: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
) -> None:
    """The gradients of x and of the norm's parameters, the first two of `sums`. `upstream`: that of the norm of x[at]."""
    put_norm(sums, grad_x, at, *steps.norm_backward(upstream.view(x[at].shape), x[at], weight, *statistics))


def put_norm(sums: Sums, grad_x: Whole, at: Chunk, piece: Tensor, of_weight: Tensor, of_bias: Tensor) -> None:
    """Take in the gradients of x[at] and of the norm's parameters."""
    grad_x.put(at, piece)
    sums.add(0, of_weight)
    sums.add(1, of_bias)
