"""Operators that begin with a layer norm. None keeps the norm: the backward pass forms it again from the operator's input.

So of a sub-layer's input only the residual stream itself is kept. `chunked` and `triton` share these operators and those of
triangle multiplication (`triangle_products`). They differ in `Steps`: what lies between the matrix products.

An intermediate wider than the residual stream is computed a few rows at a time, if it is large (`by_chunks`). On a CPU a small
one is kept for the backward pass. In a block that is recomputed this costs no memory until its own backward pass.

Shape legend: B batch, n1 n2 axes of a shard of a representation, s r those of an MSA, c channels of an operand, h hidden
channels, o p channels of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from evodsp.model.kernels.by_chunks import (
    EVERYTHING,
    SampleSums,
    Steps,
    Whole,
    cast_all,
    chunks_of,
    keeps,
    linear,
    matrix,
    norm_backward,
    put_norm,
    returned,
)
from evodsp.model.precision import wide, without_autocast

# Up to this many numbers of a transition's hidden layer are kept for the backward pass on a CPU.
_CPU_HIDDEN = 1 << 23


class Layers:
    """The operators, made of these steps. Each is differentiable once in all its inputs but masks."""

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
        """Linear layers of the norm of x: each [B n1 n2 o], contiguous; of the last `planes` layers each [B p n1 n2].

        A bias that is shorter than a layer's result belongs to the last channels. The last `planes` layers have none.
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
        """A linear layer. Keeps its inputs only."""
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
        """A linear layer of x times the sigmoid of `gate`, with one x for all sequences. Keeps its inputs only."""
        x, gate, *linear = cast_all(x, gate, weight, bias)
        with without_autocast(x.device):
            return _GatedLinear.apply(self._steps, x, gate, *linear)


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.steps = steps
        norm_weight, norm_bias, widen, widen_bias, narrow, narrow_bias = parameters
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        keep = any(ctx.needs_input_grad) and keeps(x, len(widen), _CPU_HIDDEN)
        kept = []
        for at in chunks_of(x, len(widen)):
            y = matrix(steps.norm(x[at], norm_weight, norm_bias)[0])
            hidden = torch._addmm_activation(widen_bias, y, widen.T)
            torch.addmm(narrow_bias, hidden, narrow.T, out=out[at].view(-1, x.shape[-1]))
            if keep:
                kept.append(hidden)
        ctx.save_for_backward(x, *parameters, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        steps: Steps = ctx.steps
        x, *saved = ctx.saved_tensors
        parameters, kept = saved[:6], saved[6:]
        norm_weight, norm_bias, widen, widen_bias, narrow, _ = parameters
        chunks = chunks_of(x, len(widen))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), steps.sums(chunks, *parameters)
        for n, at in enumerate(chunks):
            normal, *statistics = steps.norm(x[at], norm_weight, norm_bias)
            y, upstream = matrix(normal), matrix(grad[at])
            hidden = kept[n] if kept else torch._addmm_activation(widen_bias, y, widen.T)
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
    """The bias of so many channels: that of the last ones may be given alone."""
    return bias if len(bias) == channels else F.pad(bias, (channels - len(bias), 0))


def _channels_last(results: Sequence[Any], planes: int) -> list[Any]:
    """Views with channels last of all results, also of the last ones, which have channels first."""
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
