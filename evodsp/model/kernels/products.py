"""The operator of the outer product mean: outer products, summed over sequences and projected (algorithm 10).

A residue pair has c x c products (1,024 in AlphaFold2), eight times as many numbers as the pair representation. So they are
formed a few rows at a time, used and dropped, and formed again in the backward pass. `chunked` and `triton` share this and
differ in `ProductSteps`: how products are laid out and projected.

Shape legend: B batch, S sequences, I J residues, c channels of an operand, z channels of the result; i: a chunk of I.

The operators of triangle multiplication. They begin with a layer norm, like those of `by_chunks`.

Shape legend: B batch, I J residues of a shard of the pair representation, n1 n2 its axes in any order, c channels of an
operand (cc of both, cccc with their gates), z channels of the pair representation, o channels of results, * axes of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.kernels.by_chunks import (
    Chunk,
    Layers,
    Steps,
    Sums,
    Whole,
    cast_all,
    chunk_numbers,
    chunks_of,
    linear,
    matrix,
    norm_backward,
    returned,
)
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


class Triangles:
    """The operators, composed of a backend's steps. Each is differentiable once in all its inputs but masks."""

    def __init__(self, steps: Steps, dropout_add: Callable[..., Tensor]) -> None:
        """`dropout_add`: the backend's operator of this name."""
        self._steps, self._dropout_add = steps, dropout_add

    def gated_projection(
        self,
        x: Float[Tensor, "B I J z"],
        mask: Float[Tensor, "B I J"],
        norm_weight: Float[Tensor, " z"],
        norm_bias: Float[Tensor, " z"],
        weight: Float[Tensor, "cc z"],
        bias: Float[Tensor, " cc"],
        gate_weight: Float[Tensor, "cc z"],
        gate_bias: Float[Tensor, " cc"],
    ) -> Float[Tensor, "2 B c I J"]:
        """Both operands of triangle multiplication, channels first. The projections are recomputed in the backward pass."""
        x, mask = cast_all(x, mask)
        both = joined(weight, gate_weight, x), joined(bias, gate_bias, x)
        with without_autocast(x.device):
            return _GatedProjection.apply(self._steps, x, mask, norm_weight, norm_bias, *both)

    def triangle_multiplication(
        self,
        x: Float[Tensor, "B I J z"],
        mask: Float[Tensor, "B I J"],
        norm_weight: Float[Tensor, " z"],
        norm_bias: Float[Tensor, " z"],
        weight: Float[Tensor, "cc z"],
        bias: Float[Tensor, " cc"],
        gate_weight: Float[Tensor, "cc z"],
        gate_bias: Float[Tensor, " cc"],
        output_gate_weight: Float[Tensor, "z z"],
        output_gate_bias: Float[Tensor, " z"],
        product_norm_weight: Float[Tensor, " c"],
        product_norm_bias: Float[Tensor, " c"],
        output_weight: Float[Tensor, "z c"],
        output_bias: Float[Tensor, " z"],
        outgoing: bool,
        drawn: Bool[Tensor, "B e"] | Int64[Tensor, " B"] | None = None,
        rate: float = 0.0,
        shared_dim: int = 1,
    ) -> Float[Tensor, "B I J z"]:
        """x plus its update by triangle multiplication on one device. It keeps the product and the logits of the output gate;
        the operands are formed again in the backward pass. `drawn`, `rate`, `shared_dim`: those of `dropout_add`; None: no
        dropout.
        """
        z, mask, *output_gate = cast_all(x, mask, output_gate_weight, output_gate_bias)
        both = joined(weight, gate_weight, z), joined(bias, gate_bias, z)
        norm = norm_weight, norm_bias
        with without_autocast(x.device):
            product, gate = _TriangleProduct.apply(self._steps, outgoing, z, mask, *norm, *both, *output_gate)
        after = product_norm_weight, product_norm_bias, output_weight, output_bias
        update = self._gated(product.permute(0, 2, 3, 1), gate, *after)
        return self._sum(x, update, drawn, rate, (0, 0), (x.shape[1], x.shape[2]), shared_dim)

    def gated_output(
        self,
        x: Float[Tensor, "B n1 n2 z"],
        product: Float[Tensor, "B n1 n2 c"],
        norm_weight: Float[Tensor, " z"],
        norm_bias: Float[Tensor, " z"],
        gate_weight: Float[Tensor, "z z"],
        gate_bias: Float[Tensor, " z"],
        product_norm_weight: Float[Tensor, " c"],
        product_norm_bias: Float[Tensor, " c"],
        weight: Float[Tensor, "z c"],
        bias: Float[Tensor, " z"],
        drawn: Bool[Tensor, "B e"] | Int64[Tensor, " B"] | None = None,
        rate: float = 0.0,
        offsets: tuple[int, int] = (0, 0),
        whole: tuple[int, int] = (0, 0),
        shared_dim: int = 1,
    ) -> Float[Tensor, "B n1 n2 z"]:
        """x plus its update by a product, under dropout if something is `drawn`. It keeps x, the product and the gate."""
        [gate] = Layers(self._steps).projections(x, norm_weight, norm_bias, [gate_weight], [gate_bias])
        update = self._gated(product, gate, product_norm_weight, product_norm_bias, weight, bias)
        return self._sum(x, update, drawn, rate, offsets, whole, shared_dim)

    def _gated(
        self, product: Float[Tensor, "B n1 n2 c"], gate: Float[Tensor, "B n1 n2 z"], *parameters: Tensor
    ) -> Float[Tensor, "B n1 n2 z"]:
        """A linear layer of the layer norm of the product, times the sigmoid of `gate`. It keeps only its inputs."""
        norm_weight, norm_bias, weight, bias = parameters
        product, gate, *layer = cast_all(product, gate, weight, bias)
        with without_autocast(product.device):
            return _GatedOutput.apply(self._steps, product, gate, norm_weight, norm_bias, *layer)

    def _sum(self, x: Tensor, update: Tensor, drawn: Tensor | None, *dropout: Any) -> Float[Tensor, "B n1 n2 z"]:
        return x + update if drawn is None else self._dropout_add(x, update, drawn, *dropout)


def joined(values: Tensor, gates: Tensor, like: Tensor) -> Tensor:
    """The parameters of two layers, joined, so that one matrix product computes both."""
    return torch.cat([values, gates]).to(like.dtype)


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: Steps,
        x: Tensor,
        mask: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x, mask, norm_weight, norm_bias, weight, bias)
        chunks = chunks_of(x, len(weight))
        operands = Whole(chunks, lambda: _empty_operands(x, weight))
        for at in chunks:
            y = steps.norm(x[at], norm_weight, norm_bias)[0]
            operands.put(_operands_at(at), steps.gated_operands(steps.project(y, weight, bias), mask[at]))
        return returned(operands.x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        x, mask, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, weight, bias = parameters
        chunks = chunks_of(x, len(weight))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), steps.sums(chunks, *parameters)
        for at in chunks:
            y, *statistics = steps.norm(x[at], norm_weight, norm_bias)
            projected = steps.project(y, weight, bias)
            slope, of_bias = steps.gated_operands_backward(grad[_operands_at(at)], projected, mask[at], sums.dtype(3))
            sums.add_linear(2, slope, matrix(y))
            sums.add(3, of_bias)
            norm_backward(steps, sums, grad_x, at, slope @ weight, x, norm_weight, statistics)
        return None, grad_x.x, None, *sums.results()


def _empty_operands(x: Float[Tensor, "B I J z"], weight: Float[Tensor, "cccc z"]) -> Float[Tensor, "2 B c I J"]:
    batch, rows, columns, _ = x.shape
    return x.new_empty(2, batch, len(weight) // 4, rows, columns)


def _operands_at(at: Chunk) -> tuple[Any, ...]:
    """The index of a chunk's operands."""
    sample, rows = at
    return slice(None), sample, slice(None), rows


class _TriangleProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, steps: Steps, outgoing: bool, x: Tensor, mask: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.steps, ctx.outgoing = steps, outgoing
        norm_weight, norm_bias, weight, bias, gate_weight, gate_bias = parameters
        chunks = chunks_of(x, len(weight))
        operands = Whole(chunks, lambda: _empty_operands(x, weight))
        gate = x.new_empty(*x.shape[:3], len(gate_weight))
        for at in chunks:
            y = steps.norm(x[at], norm_weight, norm_bias)[0]
            operands.put(_operands_at(at), steps.gated_operands(steps.project(y, weight, bias), mask[at]))
            torch.addmm(gate_bias, matrix(y), gate_weight.T, out=gate[at].view(-1, len(gate_weight)))
        ctx.save_for_backward(x, mask, *parameters)
        a, b = operands.x.contiguous()
        return multiply_edges(a, b, outgoing), gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_gate: Tensor) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        x, mask, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, weight, bias, gate_weight, _ = parameters
        chunks = chunks_of(x, len(weight))
        operands = Whole(chunks, lambda: _empty_operands(x, weight))
        formed = []  # norms, their statistics and projections of all chunks, kept only during this call
        for at in chunks:
            normal = steps.norm(x[at], norm_weight, norm_bias)
            projected = steps.project(normal[0], weight, bias)
            operands.put(_operands_at(at), steps.gated_operands(projected, mask[at]))
            formed.append((*normal, projected))
        a, b = operands.x.contiguous()
        grad_operands = triangle_gradients(grad.contiguous(), a, b, ctx.outgoing)
        del operands, a, b
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), steps.sums(chunks, *parameters)
        for at in chunks:
            y, mean, inverse, projected = formed.pop(0)
            slope, of_bias = steps.gated_operands_backward(
                grad_operands[_operands_at(at)], projected, mask[at], sums.dtype(3)
            )
            sums.add_linear(2, slope, matrix(y))
            sums.add(3, of_bias)
            own = matrix(grad_gate[at])
            sums.add_linear(4, own, matrix(y), bias=5)
            upstream = (slope @ weight).addmm_(own, gate_weight)
            norm_backward(steps, sums, grad_x, at, upstream, x, norm_weight, (mean, inverse))
        return None, None, grad_x.x, None, *sums.results()


def multiply_edges(
    a: Float[Tensor, "B c _ _"], b: Float[Tensor, "B c _ _"], outgoing: bool
) -> Float[Tensor, "B c _ _"]:
    """Sum over the third residue k, separately in each channel: a_ik b_jk (outgoing) or a_kj b_ki (incoming)."""
    return a @ b.mT if outgoing else b.mT @ a


def triangle_gradients(grad: Tensor, a: Tensor, b: Tensor, outgoing: bool) -> Float[Tensor, "2 B c I J"]:
    """The gradients of both operands."""
    both = a.new_empty(2, *a.shape)
    of_a, of_b = (x.flatten(0, 1) for x in both)
    grad, a, b = (x.flatten(0, 1) for x in (grad, a, b))
    torch.bmm(grad if outgoing else b, b if outgoing else grad, out=of_a)
    torch.bmm(grad.mT if outgoing else a, a if outgoing else grad.mT, out=of_b)
    return both


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: Steps,
        x: Tensor,
        gate: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x, gate, norm_weight, norm_bias, weight, bias)
        chunks = chunks_of(x, len(weight))
        out = Whole(chunks, lambda: torch.empty_like(gate, memory_format=torch.contiguous_format))
        for at in chunks:
            y = steps.norm(x[at], norm_weight, norm_bias)[0]
            out.put(at, steps.gate(linear(y, weight, bias), gate[at]))
        return returned(out.x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        x, gate, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, weight, bias = parameters
        chunks = chunks_of(x, len(weight))
        grad_x, grad_gate = (Whole(chunks, partial(torch.empty_like, like)) for like in (x, gate))
        sums = steps.sums(chunks, *parameters)
        for at in chunks:
            y, *statistics = steps.norm(x[at], norm_weight, norm_bias)
            slope, of_gate = steps.gate_backward(grad[at], linear(y, weight, bias), gate[at])
            grad_gate.put(at, of_gate)
            sums.add_linear(2, matrix(slope), matrix(y), bias=3)
            norm_backward(steps, sums, grad_x, at, matrix(slope) @ weight, x, norm_weight, statistics)
        return None, grad_x.x, grad_gate.x, *sums.results()
