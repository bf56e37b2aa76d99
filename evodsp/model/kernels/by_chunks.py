"""Operators that compute a large intermediate a few rows at a time: their common parts, projections, and the transition.

The common parts choose the chunks of rows, join the results and gradients of all chunks, and name the steps in which
backends differ. If there is one chunk, its results and gradients are used directly: no zeros, no sums, no copies into a
whole.

Projections and the transition, like triangle multiplication (`triangle_products`), begin with a layer norm. None keeps the
norm: the backward pass recomputes it from the operator's input, so that only the residual stream itself is kept. `chunked`
and `triton` share these operators. They differ in `Steps`, the steps between the matrix products.

Shape legend: B batch, N rows of attention, L positions, Q queries, H heads, D head width, n1 n2 axes of a shard of a
representation, s r those of an MSA, c channels of an operand, h hidden channels, o p channels of results, z channels of the
pair, I J residues, P positions, * axes of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from evodsp.model.precision import activation_dtype, wide, wide_product, without_autocast

CPU_NUMBERS = 1 << 18
"""Size of a chunk of an intermediate on a CPU, of every operator: about a core's cache."""
GPU_NUMBERS = 1 << 28
"""Size of a chunk of a layer's intermediate on a GPU: enough to fill it."""

Chunk = tuple[int | slice, slice]
"""Index of the first two axes of a representation: (sample, rows), or everything."""
EVERYTHING: Chunk = (slice(None), slice(None))


def chunk_numbers(x: Tensor, on_gpu: int) -> int:
    """The largest size of a chunk of an intermediate, on the device of `x`. `on_gpu`: this size on any device but a CPU."""
    return CPU_NUMBERS if x.device.type == "cpu" else on_gpu


def chunks_of(x: Float[Tensor, "B n1 n2 c"], channels: int) -> list[Chunk]:
    """Row ranges of x, small enough that an intermediate with `channels` channels fits into the size of a chunk."""
    batch, rows, columns, _ = x.shape
    budget = chunk_numbers(x, GPU_NUMBERS)
    if batch * rows * columns * channels <= budget:
        return [EVERYTHING]
    step = max(1, budget // max(1, columns * channels))
    return [
        (sample, slice(start, min(start + step, rows))) for sample in range(batch) for start in range(0, rows, step)
    ]


def returned(x: Tensor) -> Tensor:
    """x as a result of an autograd.Function's forward pass: under torch.compile, a new tensor object.

    torch.compile makes every intermediate tensor of such a forward pass a result. If an intermediate is the same object as
    the returned tensor (as after operations in place, or `contiguous` of a contiguous tensor), torch 2.11 silently takes
    the intermediate's gradient, which is zero.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x


class Whole:
    """A tensor that is computed chunk by chunk."""

    def __init__(self, chunks: Sequence[Chunk], make: Callable[[], Tensor]) -> None:
        """`make`: returns an empty tensor of the right size; not called if there is only one chunk, which then is the
        whole.
        """
        self._single = len(chunks) == 1
        if not self._single:
            self.x = make()

    def put(self, at: tuple[Any, ...], piece: Tensor) -> None:
        """Set the chunk at index `at`."""
        if self._single:
            self.x = piece
        else:
            self.x[at] = piece


class SampleSums:
    """A sum over the rows of each sample, in float32 at least, whose terms are computed chunk by chunk."""

    def __init__(self, chunks: Sequence[Chunk], make: Callable[[], Tensor]) -> None:
        """`make`: returns zeros of the right size; not called if there is only one chunk."""
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
"""(matrix [P c], rows of any stride; dtype) -> sum of all rows in this dtype."""


def column_sums(x: Float[Tensor, "P c"], dtype: torch.dtype) -> Float[Tensor, " c"]:
    """The sum of all rows, as torch computes it."""
    return x.sum(0, dtype=dtype)


class Sums:
    """Gradients of parameters, summed over chunks in float32 at least. Those of a single chunk have the precision of its
    matrix product.
    """

    def __init__(
        self, chunks: Sequence[Chunk], *parameters: Tensor | None, column_sums: ColumnSums = column_sums
    ) -> None:
        """`column_sums`: function that sums the gradients of biases."""
        self._parameters, self._several = parameters, len(chunks) > 1
        self._column_sums = column_sums
        self._totals: list[Tensor | None] = [None] * len(parameters)

    def dtype(self, number: int) -> torch.dtype:
        """Precision of the terms of one parameter's gradient: the parameter's own if there is a single term, float32 at
        least otherwise.
        """
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
        """Add to the gradients of a linear layer. `gradient`: gradient of its result; `x`: its input; both with one row per
        position.
        """
        total = self._totals[weight]
        if total is not None and total.dtype == x.dtype:
            total.addmm_(gradient.T, x)
        else:
            self.add(weight, wide_product(gradient.T, x) if self._several else gradient.T @ x)
        if bias is not None and (parameter := self._parameters[bias]) is not None:
            own = gradient[:, -len(parameter) :]
            self.add(bias, self._column_sums(own, wide(own.dtype) if self._several else own.dtype))

    def results(self) -> list[Any]:
        """The gradients; None for absent parameters and for those without a gradient."""
        pairs = zip(self._totals, self._parameters, strict=True)
        return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]


@dataclass(frozen=True)
class Steps:
    """The elementary steps between an operator's matrix products. They are not differentiable; each has its backward step."""

    norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(x [* c], weight, bias) -> layer norm of x, contiguous and in its dtype; mean and inverse deviation of each position. The
    parameters may be wider than x."""
    norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(gradient, x, weight, mean, inverse deviation) -> gradients of x, weight and bias."""
    norm_again: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] | None
    """(gradient, x, weight, bias) -> layer norm of x, as `norm` returns it; gradients of x, weight and bias. None on a CPU,
    where one pass over memory less does not pay: the products after it find less in the caches."""
    project: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(y [* I J z], weight [4c z], bias) -> projections of y in the layout that the next two steps take: [* I J 4c] or [4c
    * I J]."""
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
    """The operands in the precision of activations, because autocast does not see products inside an autograd.Function."""
    dtype = activation_dtype(x)
    return [None if operand is None else operand.to(dtype) for operand in (x, *others)]


def matrix(x: Tensor) -> Tensor:
    """A chunk as a matrix with one row per position."""
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
    """Compute the gradients of x[at] and of the norm's parameters, which are the first two of `sums`. `upstream`: gradient
    of the norm of x[at].
    """
    put_norm(sums, grad_x, at, *steps.norm_backward(upstream.view(x[at].shape), x[at], weight, *statistics))


def put_norm(sums: Sums, grad_x: Whole, at: Chunk, piece: Tensor, of_weight: Tensor, of_bias: Tensor) -> None:
    """Store the gradient of x[at], and add the gradients of the norm's parameters to `sums`."""
    grad_x.put(at, piece)
    sums.add(0, of_weight)
    sums.add(1, of_bias)


def parts_of(
    projected: Float[Tensor, "B N L 4 H D"], first: int, queries: int
) -> tuple[
    Float[Tensor, "B N Q H D"], Float[Tensor, "B N L H D"], Float[Tensor, "B N L H D"], Float[Tensor, "B N Q H D"]
]:
    """Views of `projected`: n queries from position `first` on, all keys, all values, and the gates of these queries."""
    q, k, v, gate = projected.unbind(3)
    attending = slice(first, first + queries)
    return q[:, :, attending], k, v, gate[:, :, attending]


def empty_gradient(projected: Float[Tensor, "B N L 4 H D"], queries: int) -> Float[Tensor, "B N L 4 H D"]:
    """Memory for the gradient of the projection. If some positions do not attend, their queries and gates get zero."""
    return torch.empty_like(projected) if queries == projected.shape[2] else torch.zeros_like(projected)


class Layers:
    """The operators, composed of a backend's steps. Each is differentiable once in all its inputs but masks."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def transition(
        self,
        x: Float[Tensor, "B n1 n2 c"],
        norm_weight: Float[Tensor, " c"],
        norm_bias: Float[Tensor, " c"],
        widen: Float[Tensor, "h c"],
        widen_bias: Float[Tensor, " h"],
        narrow: Float[Tensor, "c h"],
        narrow_bias: Float[Tensor, " c"],
    ) -> Float[Tensor, "B n1 n2 c"]:
        """Layer norm and two-layer perceptron. A large hidden layer is computed again in the backward pass."""
        x, *layers = cast_all(x, widen, widen_bias, narrow, narrow_bias)
        with without_autocast(x.device):
            return _Transition.apply(self._steps, x, norm_weight, norm_bias, *layers)

    def projections(
        self,
        x: Float[Tensor, "B n1 n2 c"],
        norm_weight: Float[Tensor, " c"],
        norm_bias: Float[Tensor, " c"],
        weights: Sequence[Float[Tensor, "_ c"]],
        biases: Sequence[Float[Tensor, " _"] | None],
        planes: int = 0,
    ) -> tuple[Tensor, ...]:
        """Linear layers of the layer norm of x: each result is [B n1 n2 o], contiguous; those of the last `planes` layers
        are [B p n1 n2].

        A bias that is shorter than a layer's result belongs to the last channels. The last `planes` layers have no bias.
        """
        x, *layers = cast_all(x, *(y for pair in zip(weights, biases, strict=True) for y in pair))
        with without_autocast(x.device):
            return _Projections.apply(self._steps, planes, None, x, norm_weight, norm_bias, *layers)

    def pooled_projections(
        self,
        x: Float[Tensor, "B s r c"],
        mask: Float[Tensor, "B s r"],
        norm_weight: Float[Tensor, " c"],
        norm_bias: Float[Tensor, " c"],
        weights: Sequence[Float[Tensor, "_ c"]],
        biases: Sequence[Float[Tensor, " _"] | None],
    ) -> tuple[Tensor, ...]:
        """The sum of the norm of x over sequences whose mask is 1, [B r c] in float32 at least; then `projections`."""
        x, mask, *layers = cast_all(x, mask, *(y for pair in zip(weights, biases, strict=True) for y in pair))
        with without_autocast(x.device):
            return _Projections.apply(self._steps, 0, mask, x, norm_weight, norm_bias, *layers)

    def linear(
        self, x: Float[Tensor, "B n1 n2 c"], weight: Float[Tensor, "o c"], bias: Float[Tensor, " o"]
    ) -> Float[Tensor, "B n1 n2 o"]:
        """A linear layer. It keeps only its inputs."""
        x, *parameters = cast_all(x, weight, bias)
        with without_autocast(x.device):
            return _Linear.apply(self._steps, x, *parameters)

    def gated_linear(
        self,
        x: Float[Tensor, "B 1 r c"],
        gate: Float[Tensor, "B s r c"],
        weight: Float[Tensor, "o c"],
        bias: Float[Tensor, " o"],
    ) -> Float[Tensor, "B s r o"]:
        """A linear layer of x times the sigmoid of `gate`, with one x for all sequences. It keeps only its inputs."""
        x, gate, *linear = cast_all(x, gate, weight, bias)
        with without_autocast(x.device):
            return _GatedLinear.apply(self._steps, x, gate, *linear)


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.steps = steps
        norm_weight, norm_bias, widen, widen_bias, narrow, narrow_bias = parameters
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for at in chunks_of(x, len(widen)):
            y = matrix(steps.norm(x[at], norm_weight, norm_bias)[0])
            hidden = torch._addmm_activation(widen_bias, y, widen.T)
            torch.addmm(narrow_bias, hidden, narrow.T, out=out[at].view(-1, x.shape[-1]))
        ctx.save_for_backward(x, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        x, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, widen, widen_bias, narrow, _ = parameters
        chunks = chunks_of(x, len(widen))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), steps.sums(chunks, *parameters)
        for at in chunks:
            normal, *statistics = steps.norm(x[at], norm_weight, norm_bias)
            y, upstream = matrix(normal), matrix(grad[at])
            hidden = torch._addmm_activation(widen_bias, y, widen.T)
            sums.add_linear(4, upstream, hidden, bias=5)
            slope, of_bias = steps.hidden_backward(upstream, narrow, hidden, sums.dtype(3))
            sums.add_linear(2, slope, y)
            sums.add(3, of_bias)
            norm_backward(steps, sums, grad_x, at, slope @ widen, x, norm_weight, statistics)
        return None, grad_x.x, *sums.results()


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, steps: Steps, planes: int, mask: Tensor | None, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        """With a mask, the first result is the masked sum of the norm over axis 1."""
        ctx.steps, ctx.planes = steps, planes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mask, x, *parameters)
        norm_weight, norm_bias, *layers = parameters
        weights, biases = layers[::2], layers[1::2]
        last = len(weights) - planes
        batch, n1, n2, _ = x.shape
        chunks = chunks_of(x, sum(len(w) for w in weights))
        results = [x.new_empty(batch, n1, n2, len(w)) for w in weights[:last]]
        outermost = [Whole(chunks, partial(x.new_empty, (len(w), batch, n1, n2))) for w in weights[last:]]
        whole_biases = [
            None if b is None else _of_all_channels(b, len(w)) for w, b in zip(weights, biases, strict=True)
        ]
        total = SampleSums(chunks, lambda: x.new_zeros(batch, n2, x.shape[-1], dtype=wide(x.dtype)))
        for at in chunks:
            normal = steps.norm(x[at], norm_weight, norm_bias)[0]
            y = matrix(normal)
            if mask is not None:
                total.add(at, (normal * mask[at].unsqueeze(-1)).sum(-3, dtype=wide(x.dtype)))
            for w, b, result in zip(weights, whole_biases, results, strict=False):
                out = result[at].view(-1, len(w))
                if b is None:
                    torch.mm(y, w.T, out=out)
                else:
                    torch.addmm(b, y, w.T, out=out)
            for w, whole in zip(weights[last:], outermost, strict=True):
                whole.put((slice(None), *at), (w @ y.T).view(len(w), *x[at].shape[:-1]))
        projected = *results, *(whole.x.transpose(0, 1) for whole in outermost)
        return projected if mask is None else (total.x, *projected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        mask, x, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, *layers = parameters
        of_total, grads = (None, grads) if mask is None else (grads[0], grads[1:])
        weights = layers[::2]
        chunks = chunks_of(x, sum(len(w) for w in weights))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), steps.sums(chunks, *parameters)
        given = [(n, grad) for n, grad in enumerate(_channels_last(grads, ctx.planes)) if grad is not None]
        for at in chunks:
            early = None if steps.norm_again else steps.norm(x[at], norm_weight, norm_bias)
            upstream = None
            for n, grad in given:
                own = grad[at].flatten(0, -2)
                if early is not None:
                    sums.add_linear(2 + 2 * n, own, matrix(early[0]), bias=3 + 2 * n)
                upstream = own @ weights[n] if upstream is None else upstream.addmm_(own, weights[n])
            if of_total is not None:
                upstream = torch.zeros_like(matrix(x[at])) if upstream is None else upstream
                of_sum = of_total[at[0]].to(x.dtype).unsqueeze(-3)
                upstream.view(x[at].shape).addcmul_(of_sum, mask[at].unsqueeze(-1))
            assert upstream is not None, "autograd calls no backward pass without a gradient"
            if early is not None:
                norm_backward(steps, sums, grad_x, at, upstream, x, norm_weight, early[1:])
            elif steps.norm_again is not None:
                normal, *found = steps.norm_again(upstream.view(x[at].shape), x[at], norm_weight, norm_bias)
                put_norm(sums, grad_x, at, *found)
                for n, grad in given:
                    sums.add_linear(2 + 2 * n, grad[at].flatten(0, -2), matrix(normal), bias=3 + 2 * n)
        return None, None, None, grad_x.x, *sums.results()


def _of_all_channels(bias: Float[Tensor, " _"], channels: int) -> Float[Tensor, " _"]:
    """Pad a short bias with leading zeros to `channels` entries."""
    return bias if len(bias) == channels else F.pad(bias, (channels - len(bias), 0))


def _channels_last(results: Sequence[Any], planes: int) -> list[Any]:
    """Views of all results with channels last. The last `planes` results are stored channels-first."""
    last = len(results) - planes
    return [*results[:last], *(None if x is None else x.permute(0, 2, 3, 1) for x in results[last:])]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x, weight, bias)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        upstream, sums = matrix(grad), ctx.steps.sums([EVERYTHING], weight, bias)
        sums.add_linear(0, upstream, matrix(x), bias=1)
        return None, (upstream @ weight).view(x.shape), *sums.results()


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x, gate, weight, bias)
        chunks = chunks_of(gate, len(weight))
        out = Whole(chunks, lambda: gate.new_empty(*gate.shape[:3], len(weight)))
        for at in chunks:
            out.put(at, linear(steps.gate(x[at[0]].expand_as(gate[at]), gate[at]), weight, bias))
        return returned(out.x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        x, gate, weight, bias = ctx.saved_tensors
        chunks = chunks_of(gate, len(weight))
        grad_gate, sums = Whole(chunks, lambda: torch.empty_like(gate)), steps.sums(chunks, weight, bias)
        grad_x = SampleSums(chunks, lambda: torch.zeros_like(x, dtype=wide(x.dtype)))
        for at in chunks:
            wide_x = x[at[0]].expand_as(gate[at])
            upstream = matrix(grad[at])
            sums.add_linear(0, upstream, matrix(steps.gate(wide_x, gate[at])), bias=1)
            of_x, of_gate = steps.gate_backward((upstream @ weight).view(gate[at].shape), wide_x, gate[at])
            grad_gate.put(at, of_gate)
            grad_x.add(at, of_x.sum(-3, keepdim=True, dtype=wide(x.dtype)))
        return None, grad_x.x.to(x.dtype), grad_gate.x, *sums.results()
