"""Operators that begin with a layer norm. None keeps the norm: the backward pass forms it again from the operator's input.

So of a sub-layer's input only the residual stream itself is kept. `chunked` and `triton` share these operators and differ in
`Pieces`: what lies between the matrix products.

An intermediate wider than the residual stream is computed a few rows at a time, if it is large (`chunks`). On a CPU a small one
is kept for the backward pass. In a block that is recomputed this costs no memory until its own backward pass.

Shape legend: B batch, n1 n2 axes of a shard of a representation, I J those of a pair, c channels of an operand, h hidden
channels, z channels of the pair representation, o p channels of results, * axes of a chunk.
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

from evodsp.model.kernels.chunks import Chunk, SampleSums, Sums, Whole, chunks_of, keeps
from evodsp.model.precision import activation_dtype, wide, without_autocast

# Up to this many numbers are kept for the backward pass on a CPU: of a transition's hidden layer, and of the projections of
# triangle multiplication, which take less time for their memory.
_CPU_HIDDEN, _CPU_PROJECTED = 1 << 23, 1 << 22


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


class Layers:
    """The operators, made of these pieces. Each is differentiable once in all its inputs but masks."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

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
        x, *layers = _cast(x, widen, widen_bias, narrow, narrow_bias)
        with without_autocast(x.device):
            return _Transition.apply(self._pieces, x, norm_weight, norm_bias, *layers)

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
        x, *layers = _cast(x, *(y for pair in zip(weights, biases, strict=True) for y in pair))
        with without_autocast(x.device):
            return _Projections.apply(self._pieces, planes, None, x, norm_weight, norm_bias, *layers)

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
        x, mask, *layers = _cast(x, mask, *(y for pair in zip(weights, biases, strict=True) for y in pair))
        with without_autocast(x.device):
            return _Projections.apply(self._pieces, 0, mask, x, norm_weight, norm_bias, *layers)

    def gated_linear(
        self,
        x: Float[Tensor, "B 1 r c"],
        gate: Float[Tensor, "B s r c"],
        weight: Float[Tensor, "o c"],
        bias: Float[Tensor, " o"],
    ) -> Float[Tensor, "B s r o"]:
        """A linear layer of x times the sigmoid of `gate`, with one x for all sequences. Keeps its inputs only."""
        x, gate, *linear = _cast(x, gate, weight, bias)
        with without_autocast(x.device):
            return _GatedLinear.apply(self._pieces, x, gate, *linear)

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
        """Both operands of triangle multiplication, channels first. Projections are computed again in the backward pass."""
        x, mask = _cast(x, mask)
        both = _both(weight, gate_weight, x), _both(bias, gate_bias, x)
        with without_autocast(x.device):
            return _GatedProjection.apply(self._pieces, x, mask, norm_weight, norm_bias, *both)

    def triangle_product(
        self,
        x: Float[Tensor, "B I J z"],
        mask: Float[Tensor, "B I J"],
        norm_weight: Float[Tensor, " z"],
        norm_bias: Float[Tensor, " z"],
        weight: Float[Tensor, "cc z"],
        bias: Float[Tensor, " cc"],
        gate_weight: Float[Tensor, "cc z"],
        gate_bias: Float[Tensor, " cc"],
        output_gate_weight: Float[Tensor, "o z"],
        output_gate_bias: Float[Tensor, " o"],
        outgoing: bool,
    ) -> tuple[Float[Tensor, "B c I I"], Float[Tensor, "B I J o"]]:
        """The product of both operands, and the logits of the output gate. Operands are formed again in the backward pass."""
        x, mask, *output_gate = _cast(x, mask, output_gate_weight, output_gate_bias)
        both = _both(weight, gate_weight, x), _both(bias, gate_bias, x)
        norm = norm_weight, norm_bias
        with without_autocast(x.device):
            return _TriangleProduct.apply(self._pieces, outgoing, x, mask, *norm, *both, *output_gate)

    def gated_output(
        self,
        x: Float[Tensor, "B n1 n2 c"],
        gate: Float[Tensor, "B n1 n2 o"],
        norm_weight: Float[Tensor, " c"],
        norm_bias: Float[Tensor, " c"],
        weight: Float[Tensor, "o c"],
        bias: Float[Tensor, " o"],
    ) -> Float[Tensor, "B n1 n2 o"]:
        """A linear layer of the norm of x, times the sigmoid of `gate`. Keeps its inputs only."""
        x, gate, *linear = _cast(x, gate, weight, bias)
        with without_autocast(x.device):
            return _GatedOutput.apply(self._pieces, x, gate, norm_weight, norm_bias, *linear)


def _cast(x: Tensor, *others: Any) -> list[Any]:
    """The operands in the precision of activations. Autocast does not see the products inside of a Function."""
    dtype = activation_dtype(x)
    return [None if operand is None else operand.to(dtype) for operand in (x, *others)]


def _both(values: Tensor, gates: Tensor, like: Tensor) -> Tensor:
    """The parameters of two layers as those of one, so that one matrix product serves both."""
    return torch.cat([values, gates]).to(like.dtype)


def _matrix(x: Tensor) -> Tensor:
    """A chunk with one row a position."""
    return x.reshape(-1, x.shape[-1])


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Pieces, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.pieces = pieces
        norm_weight, norm_bias, widen, widen_bias, narrow, narrow_bias = parameters
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        keep = any(ctx.needs_input_grad) and keeps(x, len(widen), _CPU_HIDDEN)
        kept = []
        for at in chunks_of(x, len(widen)):
            y = _matrix(pieces.norm(x[at], norm_weight, norm_bias)[0])
            hidden = torch._addmm_activation(widen_bias, y, widen.T)
            torch.addmm(narrow_bias, hidden, narrow.T, out=out[at].view(-1, x.shape[-1]))
            if keep:
                kept.append(hidden)
        ctx.save_for_backward(x, *parameters, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces: Pieces = ctx.pieces
        x, *saved = ctx.saved_tensors
        parameters, kept = saved[:6], saved[6:]
        norm_weight, norm_bias, widen, widen_bias, narrow, _ = parameters
        chunks = chunks_of(x, len(widen))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), Sums(chunks, *parameters)
        for n, at in enumerate(chunks):
            normal, *statistics = pieces.norm(x[at], norm_weight, norm_bias)
            y, upstream = _matrix(normal), _matrix(grad[at])
            hidden = kept[n] if kept else torch._addmm_activation(widen_bias, y, widen.T)
            sums.add_linear(4, upstream, hidden, bias=5)
            slope, of_bias = pieces.hidden_backward(upstream, narrow, hidden, sums.dtype(3))
            sums.add_linear(2, slope, y)
            sums.add(3, of_bias)
            _norm_backward(pieces, sums, grad_x, at, slope @ widen, x, norm_weight, statistics)
        return None, grad_x.x, *sums.results()


def _norm_backward(
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
    _put_norm(sums, grad_x, at, *pieces.norm_backward(upstream.view(x[at].shape), x[at], weight, *statistics))


def _put_norm(sums: Sums, grad_x: Whole, at: Chunk, piece: Tensor, of_weight: Tensor, of_bias: Tensor) -> None:
    """Take in the gradients of x[at] and of the norm's parameters."""
    grad_x.put(at, piece)
    sums.add(0, of_weight)
    sums.add(1, of_bias)


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pieces: Pieces, planes: int, mask: Tensor | None, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        """With a mask, the first result is the masked sum of the norm over axis 1."""
        ctx.pieces, ctx.planes = pieces, planes
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
            normal = pieces.norm(x[at], norm_weight, norm_bias)[0]
            y = _matrix(normal)
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
        pieces: Pieces = ctx.pieces
        mask, x, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, *layers = parameters
        of_total, grads = (None, grads) if mask is None else (grads[0], grads[1:])
        weights = layers[::2]
        chunks = chunks_of(x, sum(len(w) for w in weights))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), Sums(chunks, *parameters)
        given = [(n, grad) for n, grad in enumerate(_channels_last(grads, ctx.planes)) if grad is not None]
        for at in chunks:
            early = None if pieces.norm_again else pieces.norm(x[at], norm_weight, norm_bias)
            upstream = None
            for n, grad in given:
                own = grad[at].flatten(0, -2)
                if early is not None:
                    sums.add_linear(2 + 2 * n, own, _matrix(early[0]), bias=3 + 2 * n)
                upstream = own @ weights[n] if upstream is None else upstream.addmm_(own, weights[n])
            if of_total is not None:
                upstream = torch.zeros_like(_matrix(x[at])) if upstream is None else upstream
                of_sum = of_total[at[0]].to(x.dtype).unsqueeze(-3)
                upstream.view(x[at].shape).addcmul_(of_sum, mask[at].unsqueeze(-1))
            assert upstream is not None, "autograd calls no backward pass without a gradient"
            if early is not None:
                _norm_backward(pieces, sums, grad_x, at, upstream, x, norm_weight, early[1:])
            elif pieces.norm_again is not None:
                normal, *found = pieces.norm_again(upstream.view(x[at].shape), x[at], norm_weight, norm_bias)
                _put_norm(sums, grad_x, at, *found)
                for n, grad in given:
                    sums.add_linear(2 + 2 * n, grad[at].flatten(0, -2), _matrix(normal), bias=3 + 2 * n)
        return None, None, None, grad_x.x, *sums.results()


def _of_all_channels(bias: Float[Tensor, " _"], channels: int) -> Float[Tensor, " _"]:
    """The bias of so many channels: that of the last ones may be given alone."""
    return bias if len(bias) == channels else F.pad(bias, (channels - len(bias), 0))


def _channels_last(results: Sequence[Any], planes: int) -> list[Any]:
    """Views with channels last of all results, also of the last ones, which have channels first."""
    last = len(results) - planes
    return [*results[:last], *(None if x is None else x.permute(0, 2, 3, 1) for x in results[last:])]


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pieces: Pieces,
        x: Tensor,
        mask: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(x, mask, norm_weight, norm_bias, weight, bias)
        chunks = chunks_of(x, len(weight))
        operands = Whole(chunks, lambda: _empty_operands(x, weight))
        for at in chunks:
            y = pieces.norm(x[at], norm_weight, norm_bias)[0]
            operands.put(_operands_at(at), pieces.gated_operands(pieces.project(y, weight, bias), mask[at]))
        return operands.x.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces: Pieces = ctx.pieces
        x, mask, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, weight, bias = parameters
        chunks = chunks_of(x, len(weight))
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), Sums(chunks, *parameters)
        for at in chunks:
            y, *statistics = pieces.norm(x[at], norm_weight, norm_bias)
            projected = pieces.project(y, weight, bias)
            slope, of_bias = pieces.gated_operands_backward(grad[_operands_at(at)], projected, mask[at], sums.dtype(3))
            sums.add_linear(2, slope, _matrix(y))
            sums.add(3, of_bias)
            _norm_backward(pieces, sums, grad_x, at, slope @ weight, x, norm_weight, statistics)
        return None, grad_x.x, None, *sums.results()


def linear(y: Float[Tensor, "*chunk z"], weight: Tensor, bias: Tensor) -> Float[Tensor, "*chunk o"]:
    """A linear layer of the last axis."""
    return torch.addmm(bias, _matrix(y), weight.T).view(*y.shape[:-1], len(weight))


def _empty_operands(x: Float[Tensor, "B I J z"], weight: Float[Tensor, "cccc z"]) -> Float[Tensor, "2 B c I J"]:
    batch, rows, columns, _ = x.shape
    return x.new_empty(2, batch, len(weight) // 4, rows, columns)


def _operands_at(at: Chunk) -> tuple[Any, ...]:
    """Where a chunk's operands are."""
    sample, rows = at
    return slice(None), sample, slice(None), rows


class _TriangleProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pieces: Pieces, outgoing: bool, x: Tensor, mask: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.pieces, ctx.outgoing = pieces, outgoing
        norm_weight, norm_bias, weight, bias, gate_weight, gate_bias = parameters
        chunks = chunks_of(x, len(weight))
        operands = Whole(chunks, lambda: _empty_operands(x, weight))
        gate = x.new_empty(*x.shape[:3], len(gate_weight))
        keep = any(ctx.needs_input_grad) and keeps(x, len(weight), _CPU_PROJECTED)
        kept = []
        for at in chunks:
            y = pieces.norm(x[at], norm_weight, norm_bias)[0]
            projected = pieces.project(y, weight, bias)
            operands.put(_operands_at(at), pieces.gated_operands(projected, mask[at]))
            torch.addmm(gate_bias, _matrix(y), gate_weight.T, out=gate[at].view(-1, len(gate_weight)))
            if keep:
                kept.append(projected)
        ctx.save_for_backward(x, mask, *parameters, *kept)
        a, b = operands.x.contiguous()
        return multiply_edges(a, b, outgoing), gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_gate: Tensor) -> tuple[Tensor | None, ...]:
        pieces: Pieces = ctx.pieces
        x, mask, *saved = ctx.saved_tensors
        parameters, kept = saved[:6], saved[6:]
        norm_weight, norm_bias, weight, bias, gate_weight, _ = parameters
        chunks = chunks_of(x, len(weight))
        operands = Whole(chunks, lambda: _empty_operands(x, weight))
        formed = []  # norms, their statistics and projections: few enough, for all chunks, to be kept for a moment
        for n, at in enumerate(chunks):
            normal = pieces.norm(x[at], norm_weight, norm_bias)
            projected = kept[n] if kept else pieces.project(normal[0], weight, bias)
            operands.put(_operands_at(at), pieces.gated_operands(projected, mask[at]))
            formed.append((*normal, projected))
        a, b = operands.x.contiguous()
        grad_operands = _triangle_gradients(grad.contiguous(), a, b, ctx.outgoing)
        del operands, a, b
        grad_x, sums = Whole(chunks, lambda: torch.empty_like(x)), Sums(chunks, *parameters)
        for at in chunks:
            y, mean, inverse, projected = formed.pop(0)
            slope, of_bias = pieces.gated_operands_backward(
                grad_operands[_operands_at(at)], projected, mask[at], sums.dtype(3)
            )
            sums.add_linear(2, slope, _matrix(y))
            sums.add(3, of_bias)
            own = _matrix(grad_gate[at])
            sums.add_linear(4, own, _matrix(y), bias=5)
            upstream = (slope @ weight).addmm_(own, gate_weight)
            _norm_backward(pieces, sums, grad_x, at, upstream, x, norm_weight, (mean, inverse))
        return None, None, grad_x.x, None, *sums.results()


def multiply_edges(
    a: Float[Tensor, "B c _ _"], b: Float[Tensor, "B c _ _"], outgoing: bool
) -> Float[Tensor, "B c _ _"]:
    """Sum over the third residue k, separately in each channel: a_ik b_jk (outgoing) or a_kj b_ki (incoming)."""
    return a @ b.mT if outgoing else b.mT @ a


def _triangle_gradients(grad: Tensor, a: Tensor, b: Tensor, outgoing: bool) -> Float[Tensor, "2 B c I J"]:
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
        pieces: Pieces,
        x: Tensor,
        gate: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(x, gate, norm_weight, norm_bias, weight, bias)
        chunks = chunks_of(x, len(weight))
        out = Whole(chunks, lambda: torch.empty_like(gate, memory_format=torch.contiguous_format))
        for at in chunks:
            y = pieces.norm(x[at], norm_weight, norm_bias)[0]
            out.put(at, pieces.gate(linear(y, weight, bias), gate[at]))
        return out.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces: Pieces = ctx.pieces
        x, gate, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, weight, bias = parameters
        chunks = chunks_of(x, len(weight))
        grad_x, grad_gate = (Whole(chunks, partial(torch.empty_like, like)) for like in (x, gate))
        sums = Sums(chunks, *parameters)
        for at in chunks:
            y, *statistics = pieces.norm(x[at], norm_weight, norm_bias)
            slope, of_gate = pieces.gate_backward(grad[at], linear(y, weight, bias), gate[at])
            grad_gate.put(at, of_gate)
            sums.add_linear(2, _matrix(slope), _matrix(y), bias=3)
            _norm_backward(pieces, sums, grad_x, at, _matrix(slope) @ weight, x, norm_weight, statistics)
        return None, grad_x.x, grad_gate.x, *sums.results()


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Pieces, x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(x, gate, weight, bias)
        chunks = chunks_of(gate, len(weight))
        out = Whole(chunks, lambda: gate.new_empty(*gate.shape[:3], len(weight)))
        for at in chunks:
            out.put(at, linear(pieces.gate(x[at[0]].expand_as(gate[at]), gate[at]), weight, bias))
        return out.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces: Pieces = ctx.pieces
        x, gate, weight, bias = ctx.saved_tensors
        chunks = chunks_of(gate, len(weight))
        grad_gate, sums = Whole(chunks, lambda: torch.empty_like(gate)), Sums(chunks, weight, bias)
        grad_x = SampleSums(chunks, lambda: torch.zeros_like(x, dtype=wide(x.dtype)))
        for at in chunks:
            wide_x = x[at[0]].expand_as(gate[at])
            upstream = _matrix(grad[at])
            sums.add_linear(0, upstream, _matrix(pieces.gate(wide_x, gate[at])), bias=1)
            of_x, of_gate = pieces.gate_backward((upstream @ weight).view(gate[at].shape), wide_x, gate[at])
            grad_gate.put(at, of_gate)
            grad_x.add(at, of_x.sum(-3, keepdim=True, dtype=wide(x.dtype)))
        return None, grad_x.x.to(x.dtype), grad_gate.x, *sums.results()
