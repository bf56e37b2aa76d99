"""The default backend on every device but GPUs: operators are computed a few rows at a time, and large intermediates are
never whole.

The logits of attention are by far the largest array of an Evoformer block ([S, H, R, R] and [R, H, R, R]). They are
computed, used and freed chunk by chunk, and recomputed in the backward pass. On a CPU the working set stays in cache; on
every device, memory is linear in the inputs and the bias. Outer products (`outer_product`) and wide layers (`by_chunks`) are
computed in the same way.

Shape legend: B batch, N rows of the outer axis (each attends within itself), H heads, Q queries, K keys, D head width, S
sequences, I J residues, c channels of an operand, z channels of the result; n, i: a chunk of N, of I.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from evodsp.model.kernels.by_chunks import (
    Layers,
    Steps,
    Sums,
    cast_all,
    chunk_numbers,
    column_sums,
    empty_gradient,
    parts_of,
)
from evodsp.model.kernels.products import OuterProducts, ProductSteps, Triangles
from evodsp.model.kernels.reference import LOG2_E, layer_norm
from evodsp.model.precision import mask_bias, wide, wide_product, without_autocast
from evodsp.rng import at_least, key_words, philox4x32

# Random numbers that a GPU draws at a time: enough to fill it.
_GPU_DRAWS = 1 << 22


def draw_masks(keys: Int64[Tensor, "L B"], elements: int, rate: float) -> Bool[Tensor, "L B e"]:
    """Whether to keep each element: `Draws(key).uniform_at(element) >= rate`, bit for bit, for every layer and sample.

    `keys`: the keys of the streams (`Draws.signed_key`). `elements`: number of elements of each mask.
    """
    flat = keys.reshape(-1, 1)
    kept = torch.empty(flat.shape[0], elements, dtype=torch.bool, device=keys.device)
    piece = chunk_numbers(keys, _GPU_DRAWS)
    width = min(elements, piece)
    height = piece // max(width, 1)
    for start in range(0, elements, max(width, 1)):
        positions = torch.arange(start, min(start + width, elements), device=keys.device)
        for row in range(0, flat.shape[0], height):
            words = philox4x32((positions, 0, 0, 0), key_words(flat[row : row + height]))[0]
            kept[row : row + height, start : start + width] = at_least(words, rate)
    return kept.view(*keys.shape, elements)


def dropout_add(
    x: Float[Tensor, "B n1 n2 c"],
    update: Float[Tensor, "B n1 n2 c"],
    drawn: Bool[Tensor, "B e"] | Int64[Tensor, " B"],
    rate: float,
    offsets: tuple[int, int],
    whole: tuple[int, int],
    shared_dim: int,
) -> Float[Tensor, "B n1 n2 c"]:
    """x + update * keep / (1 - rate), scaled and added in fp32 at least, in the dtype of x.

    `drawn`: the mask of the WHOLE representation, constant along `shared_dim` (1 or 2), as `draw_masks` draws it: e counts the
    elements of the other axis and of the channels. Or the keys to draw it from here. `whole`: sizes of axes 1 and 2 over all
    shards; `offsets`: where this shard begins.
    """
    sizes = [*whole, x.shape[-1]]
    sizes[shared_dim - 1] = 1
    if drawn.dtype != torch.bool:
        drawn = draw_masks(drawn.unsqueeze(0), math.prod(sizes), rate).squeeze(0)
    other = 3 - shared_dim
    keep = drawn.view(len(drawn), *sizes).narrow(other, offsets[other - 1], x.shape[other])
    # The mask is exact in every precision and the scale stays a number, which `addcmul` applies in fp32 at least.
    return torch.addcmul(x, update, keep.to(x.dtype), value=1.0 / (1.0 - rate)).to(x.dtype)


__all__ = [
    "attention",
    "biased_attention",
    "dropout_add",
    "gated_linear",
    "gated_output",
    "gated_projection",
    "global_attention",
    "layer_norm",
    "linear",
    "outer_product",
    "pooled_projections",
    "projections",
    "transition",
    "triangle_multiplication",
]

GPU_LOGITS = 1 << 26
"""Size of a chunk of logits on a GPU: enough to fill it."""


def attention(projected: Float[Tensor, "B N L 4 H D"], keys: Float[Tensor, "B N L"]) -> Float[Tensor, "B N L H D"]:
    """Gated attention within each row (algorithm 8). It is differentiable once in `projected`."""
    with without_autocast(projected.device):
        return _Attention.apply(projected, keys, None, 0)


def biased_attention(
    projected: Float[Tensor, "B N L 4 H D"],
    keys: Float[Tensor, "B N L"],
    pair_bias: Float[Tensor, "B H Q L"],
    first: int = 0,
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention with a bias that all rows share (algorithms 7, 13, 14), differentiable once in all inputs but `keys`."""
    with without_autocast(projected.device):
        return _Attention.apply(projected, keys, pair_bias, first)


def global_attention(
    q: Float[Tensor, "B r H D"], key_value: Float[Tensor, "B s r 2 D"], keys: Float[Tensor, "B s r"]
) -> Float[Tensor, "B r H D2"]:
    """Attention of one query per column and head over the sequences of a shard, not yet divided. It is differentiable once
    in `q` and `key_value`."""
    q, key_value = cast_all(q, key_value)
    with without_autocast(q.device):
        return _GlobalAttention.apply(q, key_value, keys)


def _heads_first(x: Float[Tensor, "n L H D"]) -> Float[Tensor, "n H L D"]:
    return x.transpose(1, 2)


def _factor(x: Float[Tensor, "n L H D"]) -> Float[Tensor, "n H L D"]:
    """A contiguous copy, which each product of strided operands would make again. On a CPU it is in float32 at least."""
    dtype = x.dtype if x.device.type == "cuda" else wide(x.dtype)
    return _heads_first(x).to(dtype, memory_format=torch.contiguous_format, copy=True)


def _weights(
    q: Float[Tensor, "n H Q D"],
    k: Float[Tensor, "n H K D"],
    masked: Float[Tensor, "n 1 1 K"],
    pair_bias: Float[Tensor, "H Q K"] | None,
) -> Float[Tensor, "n H Q K"]:
    """Softmax of the logits, in float32 at least. `masked`: the bias of absent keys."""
    (n, heads, queries, width), length = q.shape, k.shape[2]
    # The logits are scaled, and not the queries: in half precision these would be rounded again.
    if q.dtype == masked.dtype:
        logits = q.new_empty(n, heads, queries, length)
        if pair_bias is None:
            logits.copy_(masked)
        else:
            torch.add(pair_bias, masked, out=logits)
        logits.view(-1, queries, length).baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT, alpha=width**-0.5)
    else:
        logits = wide_product(q, k.mT)
        torch.add(masked if pair_bias is None else pair_bias + masked, logits, alpha=width**-0.5, out=logits)
    return logits.softmax(-1)


def _masked(keys: Float[Tensor, "B N K"], dtype: torch.dtype) -> Float[Tensor, "B N 1 1 K"]:
    """The bias of absent keys, in float32 at least."""
    # This copy is contiguous because torch.compile lays out a sum like its operands, not like the tensor that receives it.
    return mask_bias(keys.to(wide(dtype))).contiguous()[:, :, None, None, :]


def _row_chunks(q: Float[Tensor, "B N Q H D"], keys: int) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, rows, queries, heads, _ = q.shape
    step = max(1, chunk_numbers(q, GPU_LOGITS) // max(1, heads * queries * keys))
    for sample in range(batch):
        for start in range(0, rows, step):
            yield sample, slice(start, start + step)


def _query_chunks(q: Float[Tensor, "B N Q H D"], keys: int) -> list[slice]:
    """All queries of a row in one chunk, or in several if the row has too many logits: at 2,048 residues these take half the
    time of whole rows."""
    _, _, queries, heads, _ = q.shape
    step = max(1, chunk_numbers(q, GPU_LOGITS) // max(1, heads * keys))
    return [slice(start, start + step) for start in range(0, queries, step)]


class _Attention(torch.autograd.Function):
    """Attention whose backward pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, keys: Tensor, pair_bias: Tensor | None, first: int) -> Tensor:
        q, k, v, gate = parts_of(projected, first, _queries(projected, pair_bias))
        if pair_bias is not None:  # each chunk reads it once; around the ending node it is transposed
            pair_bias = pair_bias.contiguous()
        # The result has the gate's order of strides, so that the caller's transposition costs no copy.
        out = torch.empty_like(gate)
        masked, columns = _masked(keys, projected.dtype), _query_chunks(q, k.shape[2])
        for b, rows in _row_chunks(q, k.shape[2]):
            q_, k_, v_ = (_factor(x[b, rows]) for x in (q, k, v))
            for some in columns:
                shared = None if pair_bias is None else pair_bias[b, :, some]
                weights = _weights(q_[:, :, some], k_, masked[b, rows], shared)
                attended = _heads_first(wide_product(weights, v_))
                out[b, rows, some] = _opening(gate[b, rows, some]).mul_(attended)
        ctx.first = first
        ctx.save_for_backward(projected, keys, pair_bias, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, keys, pair_bias, out = ctx.saved_tensors
        queries = _queries(projected, pair_bias)
        q, k, v, gate = parts_of(projected, ctx.first, queries)
        grad_projected = empty_gradient(projected, queries)
        grad_q, grad_k, grad_v, grad_gate = parts_of(grad_projected, ctx.first, queries)
        grad_bias = None if pair_bias is None else torch.zeros_like(pair_bias, dtype=wide(pair_bias.dtype))
        scale, masked = q.shape[-1] ** -0.5, _masked(keys, projected.dtype)
        for b, rows in _row_chunks(q, k.shape[2]):
            shared = None if pair_bias is None else pair_bias[b]
            q_, k_, v_ = (_factor(x[b, rows]) for x in (q, k, v))
            weights = _weights(q_, k_, masked[b, rows], shared)
            opening = _opening(gate[b, rows])
            grad_gate[b, rows] = (grad[b, rows].to(opening.dtype) * out[b, rows]).mul_(1.0 - opening)
            upstream = _factor((grad[b, rows] * opening).to(v_.dtype))
            _heads_first(grad_v[b, rows]).copy_(wide_product(weights.mT, upstream))
            # This subtracts the sum over keys of weight x gradient. Output x gradient equals it, but would add the rounding
            # of the output.
            slope = torch._softmax_backward_data(wide_product(upstream, v_.mT), weights, -1, weights.dtype)
            if grad_bias is not None:
                grad_bias[b] += slope.sum(0)
            _heads_first(grad_q[b, rows]).copy_(wide_product(slope, k_).mul_(scale))
            _heads_first(grad_k[b, rows]).copy_(wide_product(slope.mT, q_).mul_(scale))
        return grad_projected, None, None if grad_bias is None else grad_bias.to(pair_bias.dtype), None


class _GlobalAttention(torch.autograd.Function):
    """Global attention whose backward pass recomputes the weights, a few columns at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, key_value: Tensor, keys: Tensor) -> Tensor:
        width = q.shape[-1]
        sums = q.new_empty(*q.shape[:3], width + 2, dtype=wide(q.dtype))
        for b, columns in _row_chunks(q.unsqueeze(2), key_value.shape[1]):
            logits, v = _global_logits(q[b, columns], key_value[b, :, columns], keys[b, :, columns])[:2]
            numerator, denominator, shift = sums[b, columns].split((width, 1, 1), -1)
            if logits.shape[-1] > 0:
                shift.copy_(logits.amax(-1, keepdim=True))
            else:
                shift.fill_(torch.finfo(sums.dtype).min)
            weights = logits.sub_(shift).exp2_()
            numerator.copy_(wide_product(weights, v))
            denominator.copy_(weights.sum(-1, keepdim=True))
        ctx.save_for_backward(q, key_value, keys, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, key_value, keys, sums = ctx.saved_tensors
        width = q.shape[-1]
        grad_q, grad_key_value = torch.empty_like(q), torch.empty_like(key_value)
        for b, columns in _row_chunks(q.unsqueeze(2), key_value.shape[1]):
            logits, v, k, own_q = _global_logits(q[b, columns], key_value[b, :, columns], keys[b, :, columns])
            weights = logits.sub_(sums[b, columns, :, -1:]).exp2_()
            upstream = grad[b, columns, :, :width].to(v.dtype)
            slope = wide_product(upstream, v.mT).add_(grad[b, columns, :, width : width + 1]).mul_(weights)
            slope.mul_(width**-0.5)
            grad_q[b, columns] = wide_product(slope, k)
            of_k, of_v = (x.transpose(0, 1) for x in grad_key_value[b, :, columns].unbind(-2))
            of_k.copy_(wide_product(slope.mT, own_q))
            of_v.copy_(wide_product(weights.mT, upstream))
        return grad_q, grad_key_value, None


def _global_logits(
    q: Float[Tensor, "n H D"], key_value: Float[Tensor, "K n 2 D"], keys: Float[Tensor, "K n"]
) -> tuple[Float[Tensor, "n H K"], Float[Tensor, "n K D"], Float[Tensor, "n K D"], Float[Tensor, "n H D"]]:
    """Logits in base 2, and the factors v, k and q of a few columns."""
    dtype = q.dtype if q.device.type == "cuda" else wide(q.dtype)
    q = q.to(dtype)
    k, v = key_value.permute(2, 1, 0, 3).to(dtype, memory_format=torch.contiguous_format, copy=True)
    bias = (mask_bias(keys.to(wide(dtype))) * LOG2_E).T.unsqueeze(1)
    logits = wide_product(q, k.mT)
    return torch.add(bias, logits, alpha=LOG2_E * q.shape[-1] ** -0.5, out=logits), v, k, q


def _queries(projected: Tensor, pair_bias: Tensor | None) -> int:
    return projected.shape[2] if pair_bias is None else pair_bias.shape[2]


def _opening(gate: Tensor) -> Tensor:
    """The sigmoid of a gate's logits, in float32 at least."""
    return gate.to(wide(gate.dtype)).sigmoid()


def _norm(x: Float[Tensor, "*chunk c"], weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), 1e-5)


def _norm_backward(
    grad: Tensor, x: Float[Tensor, "*chunk c"], weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.to(x.dtype)
    # Only the shape of the bias is read.
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], mean, inverse, weight, weight, [True, True, True]
    )


def _project(y: Float[Tensor, "*chunk I J z"], weight: Tensor, bias: Tensor) -> Float[Tensor, "cccc *chunk I J"]:
    """The projection with channels first, as triangle multiplication takes it. A transposition afterwards takes a third of
    the product's time.
    """
    return torch.addmm(bias.unsqueeze(1), weight, y.flatten(0, -2).T).view(len(weight), *y.shape[:-1])


def _gated_operands(
    projected: Float[Tensor, "cccc *chunk I J"], mask: Float[Tensor, "*chunk I J"]
) -> Float[Tensor, "2 *chunk c I J"]:
    values, gates = projected.chunk(2)
    return _channels_before_pairs(gates.sigmoid().mul_(values).mul_(mask))


def _gated_operands_backward(
    grad: Float[Tensor, "2 *chunk c I J"],
    projected: Float[Tensor, "cccc *chunk I J"],
    mask: Float[Tensor, "*chunk I J"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "positions cccc"], Float[Tensor, " cccc"]]:
    values, gates = projected.chunk(2)
    result = torch.empty_like(projected)
    of_values, of_gates = result.chunk(2)
    opening = gates.sigmoid()
    # The operands are written one after the other, because the compiler cannot write into a view that splits an axis.
    for of_operand, place in zip(grad.movedim(-3, 1).unbind(), of_values.chunk(2), strict=True):
        torch.mul(of_operand, mask, out=place)
    of_values.mul_(opening)
    # sigmoid' = sigmoid (1 - sigmoid), and the gradient of the values holds the first factor.
    torch.mul(of_values, values, out=of_gates)
    of_gates.mul_(opening.neg_().add_(1.0))
    slope = result.flatten(1).T
    return slope, slope.sum(0, dtype=dtype)


def _channels_before_pairs(x: Float[Tensor, "cc *chunk I J"]) -> Float[Tensor, "2 *chunk c I J"]:
    """A view, with the channels of either operand before the pair axes."""
    return x.unflatten(0, (2, -1)).movedim(1, -3)


def _hidden_backward(
    grad: Float[Tensor, "P c"], narrow: Float[Tensor, "c h"], hidden: Float[Tensor, "P h"], dtype: torch.dtype
) -> tuple[Float[Tensor, "P h"], Float[Tensor, " h"]]:
    slope = torch.ops.aten.threshold_backward(grad @ narrow, hidden, 0)
    return slope, slope.sum(0, dtype=dtype)


def _gate(x: Float[Tensor, "*chunk c"], logits: Float[Tensor, "*chunk c"]) -> Float[Tensor, "*chunk c"]:
    return logits.sigmoid().mul_(x)


def _gate_backward(
    grad: Float[Tensor, "*chunk c"], x: Float[Tensor, "*chunk c"], logits: Float[Tensor, "*chunk c"]
) -> tuple[Float[Tensor, "*chunk c"], Float[Tensor, "*chunk c"]]:
    opening = logits.sigmoid()
    of_x = grad * opening
    return of_x, (of_x * x).mul_(1.0 - opening)


_STEPS = Steps(
    norm=_norm,
    norm_backward=_norm_backward,
    norm_again=None,
    project=_project,
    gated_operands=_gated_operands,
    gated_operands_backward=_gated_operands_backward,
    hidden_backward=_hidden_backward,
    gate=_gate,
    gate_backward=_gate_backward,
    column_sums=column_sums,
)
_LAYERS, _TRIANGLES = Layers(_STEPS), Triangles(_STEPS, dropout_add)
gated_linear = _LAYERS.gated_linear
gated_output = _TRIANGLES.gated_output
gated_projection = _TRIANGLES.gated_projection
pooled_projections = _LAYERS.pooled_projections
projections = _LAYERS.projections
transition = _LAYERS.transition
triangle_multiplication = _TRIANGLES.triangle_multiplication


def _form(left: Float[Tensor, "S i c"], right: Float[Tensor, "S J c"]) -> Float[Tensor, "ij cc"]:
    """Outer products of a few rows with all columns, summed over sequences."""
    (_, i, c), j = left.shape, right.shape[1]
    products = left.flatten(1).T @ right.flatten(1)  # [i c, J c]: one matrix product over the sequences
    return products.view(i, c, j, c).transpose(1, 2).reshape(i * j, c * c)


def _project_products(
    products: Float[Tensor, "ij cc"], weight: Tensor, bias: Tensor | None, counts: Float[Tensor, "i J 1"] | None
) -> Float[Tensor, "_ z"]:
    out = products @ weight.T if bias is None else torch.addmm(bias, products, weight.T)
    return out if counts is None else out.div_(counts.view(-1, 1))


def _project_products_backward(
    grad: Float[Tensor, "i J z"],
    products: Float[Tensor, "ij cc"],
    weight: Float[Tensor, "z cc"],
    counts: Float[Tensor, "i J 1"] | None,
    sums: Sums,
) -> Float[Tensor, "ic Jc"]:
    i, j, z = grad.shape
    if counts is not None:
        grad = torch.div(grad, counts, out=torch.empty_like(grad, memory_format=torch.contiguous_format))
    upstream = grad.reshape(-1, z)
    sums.add_linear(0, upstream, products, bias=1)
    c = math.isqrt(weight.shape[1])
    return (upstream @ weight).view(i, j, c, c).transpose(1, 2).reshape(i * c, j * c)


PRODUCTS = ProductSteps(_form, _project_products, _project_products_backward, gpu_products=1 << 27)
outer_product = OuterProducts(PRODUCTS).outer_product
