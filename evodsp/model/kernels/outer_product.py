"""The operator of the outer product mean: outer products, summed over sequences and projected (algorithm 10).

A residue pair has c x c products (1,024 in AlphaFold2), eight times as many numbers as the pair representation. So they are
formed a few rows at a time, used and dropped, and formed again in the backward pass. `chunked` and `triton` share this and
differ in `ProductSteps`: how products are laid out and projected.

Shape legend: B batch, S sequences, I J residues, c channels of an operand, z channels of the result; i: a chunk of I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.kernels.by_chunks import Sums, Whole, chunk_numbers
from evodsp.model.precision import activation_dtype, without_autocast


@dataclass(frozen=True)
class ProductSteps:
    """The elementary steps for a few rows. They are not differentiable; each has its backward step."""

    form: Callable[[Tensor, Tensor], Tensor]
    """(left [S i c], right [S J c]) -> products, summed over sequences, in any layout."""
    project: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """(products, weight [z cc], bias [z], counts [i J 1]) -> [i J z]: (products @ weight.T + bias) / counts."""
    project_backward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Sums], Tensor]
    """(gradient of that result, products, weight, counts, sums) -> gradient of the products as a matrix [ic Jc]. It also
    adds the gradients of weight and bias to the first two of `sums`."""
    gpu_products: int
    """Number of products per chunk on a GPU: enough to fill it."""


class OuterProducts:
    """The operator, composed of a backend's steps."""

    def __init__(self, steps: ProductSteps) -> None:
        self._steps = steps

    def outer_product(
        self,
        left: Float[Tensor, "B S I c"],
        right: Float[Tensor, "B S J c"],
        weight: Float[Tensor, "z cc"],
        bias: Float[Tensor, " z"] | None = None,
        counts: Float[Tensor, "B I J 1"] | None = None,
    ) -> Float[Tensor, "B I J z"]:
        """The projected sum of outer products (algorithm 10); with `bias` and `counts`, (sum + bias) / counts. It is
        differentiable once in all inputs but `counts`.

        Inputs are saved before the result is computed. A recomputation for the backward pass ends when everything has been
        saved again; if it ends with this operator, the result is not computed a second time.
        """
        dtype = activation_dtype(left)  # autocast does not see the products inside of a Function
        left, right, weight = left.to(dtype), right.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with without_autocast(left.device):
            if torch.compiler.is_compiling():  # the compiler cannot follow state that two nodes share
                return _OuterProduct.apply(self._steps, left, right, weight, bias, counts)
            inputs, shared = (left, right, weight, bias, counts), _Shared(self._steps)
            token = _Operands.apply(shared, *inputs)
            return _Product.apply(token, shared, [None if x is None else x.detach() for x in inputs])


def _chunks(steps: ProductSteps, left: Tensor, right: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, _, rows, c = left.shape
    step = max(1, chunk_numbers(left, steps.gpu_products) // max(1, right.shape[2] * c * c))
    for sample in range(batch):
        for start in range(0, max(rows, 1), step):
            yield sample, slice(start, min(start + step, rows))


def _result(
    steps: ProductSteps,
    left: Tensor,
    right: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor | None,
) -> Float[Tensor, "B I J z"]:
    shape = left.shape[0], left.shape[2], right.shape[2], len(weight)
    chunks = list(_chunks(steps, left, right))
    out = Whole(chunks, lambda: left.new_empty(shape))
    for sample, rows in chunks:
        products = steps.form(left[sample, :, rows], right[sample])
        some = None if counts is None else counts[sample, rows]
        piece = steps.project(products, weight, bias, some)
        out.put((sample, rows), piece.view(rows.stop - rows.start, *shape[2:]))
    return out.x.view(shape)


def _gradients(steps: ProductSteps, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of both operands, the weight and the bias; None for the counts. `saved`: these five."""
    left, right, weight, bias, counts = saved
    sequences, _, c = left.shape[1:]
    chunks = list(_chunks(steps, left, right))
    of_left = Whole(chunks, lambda: torch.empty_like(left, memory_format=torch.contiguous_format))
    of_right = [Sums(chunks, sample.flatten(1)) for sample in right]
    of_parameters = Sums(chunks, weight, bias)
    for sample, rows in chunks:
        own, others = left[sample, :, rows], right[sample].flatten(1)
        products = steps.form(own, right[sample])
        some = None if counts is None else counts[sample, rows]
        slope = steps.project_backward(grad[sample, rows], products, weight, some, of_parameters)
        del products
        of_left.put((sample, slice(None), rows), (others @ slope.T).view(sequences, rows.stop - rows.start, c))
        of_right[sample].add_linear(0, own.flatten(1).T, slope)
    grad_right = [x for sums in of_right for x in sums.results()]
    whole = grad_right[0] if len(chunks) == 1 else torch.stack(grad_right)
    return of_left.x.view(left.shape), whole.view(right.shape), *of_parameters.results(), None


class _OuterProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: ProductSteps,
        left: Tensor,
        right: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(left, right, weight, bias, counts)
        return _result(steps, left, right, weight, bias, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx.steps, ctx.saved_tensors, grad)


@dataclass
class _Shared:
    """State that the two autograd nodes of an outer product share."""

    steps: ProductSteps
    gradient: Tensor | None = None


class _Operands(torch.autograd.Function):
    """Saves the inputs for the backward pass, and computes the gradients once the product's gradient has arrived. Returns a
    token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shared: _Shared,
        left: Tensor,
        right: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(left, right, weight, bias, counts)
        ctx.set_materialize_grads(False)
        return left.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: None) -> tuple[Tensor | None, ...]:
        grad, ctx.shared.gradient = ctx.shared.gradient, None
        return None, *_gradients(ctx.shared.steps, ctx.saved_tensors, grad)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, shared: _Shared, inputs: Sequence[Any]) -> Tensor:
        ctx.shared = shared
        return _result(shared.steps, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.shared.gradient = grad
        return (None,) * 3  # the token has no gradient either; autograd calls `_Operands` all the same
