"""Operators computed a few rows at a time, whose large intermediates are never whole: the default on every device but GPUs.

The logits of attention are by far the largest array of an Evoformer block ([S, H, R, R] and [R, H, R, R]). The outer products
before their projection are the second largest: a residue pair has c x c channels (1024 in AlphaFold2), eight times as many as
the pair representation. Both are computed, used and dropped chunk by chunk, and computed again in the backward pass. On a CPU
the working set stays in cache; on every device, memory is linear in the inputs and the bias.

Shape legend: B batch, N rows of the outer axis (each attends within itself), H heads, Q queries, K keys, D head width, S
sequences, I J residues, c channels of an operand, z channels of the result; n, i: a chunk of N, of I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.kernels.chunks import Sums, Whole
from evodsp.model.kernels.dropout import dropout_add
from evodsp.model.kernels.layers import Layers, Pieces
from evodsp.model.kernels.projected import empty_gradient, parts_of
from evodsp.model.kernels.reference import LOG2_E, layer_norm, mask_bias
from evodsp.model.precision import activation_dtype, wide, wide_product, without_autocast

__all__ = [
    "attention",
    "biased_attention",
    "dropout_add",
    "gated_linear",
    "gated_output",
    "gated_projection",
    "global_attention",
    "layer_norm",
    "outer_product",
    "pooled_projections",
    "projections",
    "transition",
    "triangle_product",
]

# Numbers per chunk, of logits and of outer products: about a core's cache, or enough to fill a GPU.
_CPU_LOGITS, _GPU_LOGITS = 1 << 18, 1 << 26
_CPU_PRODUCTS, _GPU_PRODUCTS = 1 << 21, 1 << 27
# A row of more logits than this many chunks is divided into queries: at 2,048 residues that takes half the time of whole rows.
_LARGE_ROW = 4
# A CPU multiplies up to so many columns faster as rows.
_NARROW = 8
# Up to this many logits or products are kept for the backward pass: recomputing so few would cost more time than the memory is
# worth.
_KEEP = 1 << 22
# Outer products of up to so many times the numbers of their operands are kept too. With more sequences the operands grow, and
# so does the time to form the products again; the products do not.
_KEEP_OPERANDS = 2


def attention(projected: Float[Tensor, "B N L 4 H D"], keys: Float[Tensor, "B N L"]) -> Float[Tensor, "B N L H D"]:
    """Gated attention within each row (algorithm 8). Differentiable once in `projected`."""
    with without_autocast(projected.device):
        return _Attention.apply(projected, keys, None, 0)


def biased_attention(
    projected: Float[Tensor, "B N L 4 H D"],
    keys: Float[Tensor, "B N L"],
    pair_bias: Float[Tensor, "B H Q L"],
    first: int = 0,
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention with a bias that all rows share (algorithms 7, 13, 14). Differentiable once in all inputs but `keys`."""
    with without_autocast(projected.device):
        return _Attention.apply(projected, keys, pair_bias, first)


def global_attention(
    q: Float[Tensor, "B r H D"], key_value: Float[Tensor, "B s r 2 D"], keys: Float[Tensor, "B s r"]
) -> Float[Tensor, "B r H D2"]:
    """Attention of one query per column and head over the sequences of a shard, not yet divided. Differentiable once in `q` and
    `key_value`."""
    q, key_value = _cast(q, key_value)
    with without_autocast(q.device):
        return _GlobalAttention.apply(q, key_value, keys)


def outer_product(
    left: Float[Tensor, "B S I c"],
    right: Float[Tensor, "B S J c"],
    weight: Float[Tensor, "z cc"],
    bias: Float[Tensor, " z"] | None = None,
    counts: Float[Tensor, "B I J 1"] | None = None,
) -> Float[Tensor, "B I J z"]:
    """The projected sum of outer products (algorithm 10); with `bias` and `counts`, (that + bias) / counts. Differentiable once
    in all inputs but `counts`.

    Inputs are saved before the result is computed. A recomputation for the backward pass ends when everything has been saved
    again; if it ends with this operator, the result is not computed a second time.
    """
    left, right, weight = _cast(left, right, weight)
    bias = None if bias is None else bias.to(left.dtype)
    with without_autocast(left.device):
        if torch.compiler.is_compiling():  # which cannot follow what two nodes share
            return _OuterProduct.apply(left, right, weight, bias, counts)
        inputs, shared = (left, right, weight, bias, counts), _Shared()
        token = _Operands.apply(shared, *inputs)
        return _Product.apply(token, shared, [None if x is None else x.detach() for x in inputs])


def _cast(x: Tensor, *others: Tensor) -> list[Tensor]:
    """The operands in the precision of activations. Autocast does not see the products inside of a Function."""
    dtype = activation_dtype(x)
    return [operand.to(dtype) for operand in (x, *others)]


def _heads_first(x: Float[Tensor, "n L H D"]) -> Float[Tensor, "n H L D"]:
    return x.transpose(1, 2)


def _factor(x: Float[Tensor, "n L H D"]) -> Float[Tensor, "n H L D"]:
    """A contiguous copy, which a product of strided operands would make each time. On a CPU in float32 at least."""
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


def _narrow_product(a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch k D"]) -> Float[Tensor, "*batch n D"]:
    """`wide_product` for the columns of a head.

    A CPU multiplies eight rows four times as fast as eight columns. From 16 on both take the same time, and the transposed
    result is slower to read.
    """
    transposed = a.device.type == "cpu" and b.shape[-1] <= _NARROW
    return wide_product(b.mT, a.mT).mT if transposed else wide_product(a, b)


def _masked(keys: Float[Tensor, "B N K"], dtype: torch.dtype) -> Float[Tensor, "B N 1 1 K"]:
    """The bias of absent keys, in float32 at least."""
    # Contiguous: torch.compile lays out a sum as its operands are, and not as the tensor that it is written into.
    return mask_bias(keys.to(wide(dtype))).contiguous()[:, :, None, None, :]


def _row_chunks(q: Float[Tensor, "B N Q H D"], keys: int) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, rows, queries, heads, _ = q.shape
    step = max(1, _logits(q) // max(1, heads * queries * keys))
    for sample in range(batch):
        for start in range(0, rows, step):
            yield sample, slice(start, start + step)


def _query_chunks(q: Float[Tensor, "B N Q H D"], keys: int) -> list[slice]:
    """All queries of a row in one chunk, or in several if the row has too many logits."""
    _, _, queries, heads, _ = q.shape
    if heads * queries * keys <= _LARGE_ROW * _logits(q):
        return [slice(0, queries)]
    step = max(1, _logits(q) // (heads * keys))
    return [slice(start, start + step) for start in range(0, queries, step)]


def _logits(q: Tensor) -> int:
    return _CPU_LOGITS if q.device.type == "cpu" else _GPU_LOGITS


class _Attention(torch.autograd.Function):
    """Attention whose backward pass recomputes the weights, unless they are few enough to keep."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, keys: Tensor, pair_bias: Tensor | None, first: int) -> Tensor:
        q, k, v, gate = parts_of(projected, first, _queries(projected, pair_bias))
        if pair_bias is not None:  # read once a chunk; around the ending node it comes transposed
            pair_bias = pair_bias.contiguous()
        # With the order of the gate's strides, so that the caller's transposition is undone.
        out = torch.empty_like(gate)
        keep = any(ctx.needs_input_grad) and q[..., 0].numel() * k.shape[2] <= _KEEP
        kept, masked = [], _masked(keys, projected.dtype)
        columns = [slice(None)] if keep else _query_chunks(q, k.shape[2])
        for b, rows in _row_chunks(q, k.shape[2]):
            q_, k_, v_ = (_factor(x[b, rows]) for x in (q, k, v))
            for some in columns:
                shared = None if pair_bias is None else pair_bias[b, :, some]
                weights = _weights(q_[:, :, some], k_, masked[b, rows], shared)
                attended = _heads_first(_narrow_product(weights, v_))
                out[b, rows, some] = _opening(gate[b, rows, some]).mul_(attended)
                if keep:
                    kept.append(weights)
        ctx.first = first
        ctx.save_for_backward(projected, keys, pair_bias, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, keys, pair_bias, out, *kept = ctx.saved_tensors
        queries = _queries(projected, pair_bias)
        q, k, v, gate = parts_of(projected, ctx.first, queries)
        grad_projected = empty_gradient(projected, queries)
        grad_q, grad_k, grad_v, grad_gate = parts_of(grad_projected, ctx.first, queries)
        grad_bias = None if pair_bias is None else torch.zeros_like(pair_bias, dtype=wide(pair_bias.dtype))
        scale, masked = q.shape[-1] ** -0.5, _masked(keys, projected.dtype)
        for n, (b, rows) in enumerate(_row_chunks(q, k.shape[2])):
            shared = None if pair_bias is None else pair_bias[b]
            q_, k_, v_ = (_factor(x[b, rows]) for x in (q, k, v))
            weights = kept[n] if kept else _weights(q_, k_, masked[b, rows], shared)
            opening = _opening(gate[b, rows])
            grad_gate[b, rows] = (grad[b, rows].to(opening.dtype) * out[b, rows]).mul_(1.0 - opening)
            upstream = _factor((grad[b, rows] * opening).to(v_.dtype))
            _heads_first(grad_v[b, rows]).copy_(_narrow_product(weights.mT, upstream))
            # The sum over keys of weight x gradient is subtracted in here. Output x gradient, which equals it, would bring in
            # the rounding of the output.
            slope = torch._softmax_backward_data(wide_product(upstream, v_.mT), weights, -1, weights.dtype)
            if grad_bias is not None:
                grad_bias[b] += slope.sum(0)
            _heads_first(grad_q[b, rows]).copy_(_narrow_product(slope, k_).mul_(scale))
            _heads_first(grad_k[b, rows]).copy_(_narrow_product(slope.mT, q_).mul_(scale))
        return grad_projected, None, None if grad_bias is None else grad_bias.to(pair_bias.dtype), None


class _GlobalAttention(torch.autograd.Function):
    """Sums whose backward pass computes the weights again, a few columns at a time."""

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
    """How far a gate is open, 0 to 1, in float32 at least."""
    return gate.to(wide(gate.dtype)).sigmoid()


def _norm(x: Float[Tensor, "*chunk c"], weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), 1e-5)


def _norm_backward(
    grad: Tensor, x: Float[Tensor, "*chunk c"], weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.to(x.dtype)
    # The bias is only looked at for its shape.
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], mean, inverse, weight, weight, [True, True, True]
    )


def _project(y: Float[Tensor, "*chunk I J z"], weight: Tensor, bias: Tensor) -> Float[Tensor, "cccc *chunk I J"]:
    """Channels first, as triangle multiplication wants them: a transposition afterwards takes a third of the product's time."""
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
) -> Float[Tensor, "positions cccc"]:
    values, gates = projected.chunk(2)
    result = torch.empty_like(projected)
    of_values, of_gates = result.chunk(2)
    opening = gates.sigmoid()
    # One operand after the other: the compiler cannot write into a view that splits an axis.
    for of_operand, place in zip(grad.movedim(-3, 1).unbind(), of_values.chunk(2), strict=True):
        torch.mul(of_operand, mask, out=place)
    of_values.mul_(opening)
    # sigmoid' = sigmoid (1 - sigmoid), and the gradient of the values holds the first factor.
    torch.mul(of_values, values, out=of_gates)
    of_gates.mul_(opening.neg_().add_(1.0))
    return result.flatten(1).T


def _channels_before_pairs(x: Float[Tensor, "cc *chunk I J"]) -> Float[Tensor, "2 *chunk c I J"]:
    """A view, with the channels of either operand before the pair axes."""
    return x.unflatten(0, (2, -1)).movedim(1, -3)


def _gate(x: Float[Tensor, "*chunk c"], logits: Float[Tensor, "*chunk c"]) -> Float[Tensor, "*chunk c"]:
    return logits.sigmoid().mul_(x)


def _gate_backward(
    grad: Float[Tensor, "*chunk c"], x: Float[Tensor, "*chunk c"], logits: Float[Tensor, "*chunk c"]
) -> tuple[Float[Tensor, "*chunk c"], Float[Tensor, "*chunk c"]]:
    opening = logits.sigmoid()
    of_x = grad * opening
    return of_x, (of_x * x).mul_(1.0 - opening)


_LAYERS = Layers(
    Pieces(_norm, _norm_backward, _project, _gated_operands, _gated_operands_backward, _gate, _gate_backward)
)
gated_linear = _LAYERS.gated_linear
gated_output = _LAYERS.gated_output
gated_projection = _LAYERS.gated_projection
pooled_projections = _LAYERS.pooled_projections
projections = _LAYERS.projections
transition = _LAYERS.transition
triangle_product = _LAYERS.triangle_product


def _product_chunks(left: Tensor, right: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (sample, rows) of each chunk."""
    batch, _, rows, c = left.shape
    budget = _CPU_PRODUCTS if left.device.type == "cpu" else _GPU_PRODUCTS
    step = max(1, budget // max(1, right.shape[2] * c * c))
    for sample in range(batch):
        for start in range(0, max(rows, 1), step):
            yield sample, slice(start, min(start + step, rows))


def _products(left: Float[Tensor, "S i c"], right: Float[Tensor, "S J c"]) -> Float[Tensor, "ij cc"]:
    """Outer products of a few rows with all columns, summed over sequences."""
    (_, i, c), j = left.shape, right.shape[1]
    products = left.flatten(1).T @ right.flatten(1)  # [i c, J c]: one matrix product over the sequences
    return products.view(i, c, j, c).transpose(1, 2).reshape(i * j, c * c)


def _kept_products(left: Tensor, right: Tensor, needed: bool) -> list[Tensor]:
    """The products of all chunks, if they are few; otherwise none. `needed`: whether there will be a backward pass."""
    b, _, i, c = left.shape
    # On a GPU memory is dearer than time.
    of_operands = _KEEP_OPERANDS * (left.numel() + right.numel()) if left.device.type == "cpu" else 0
    few = max(_KEEP, of_operands)
    if not needed or b * i * right.shape[2] * c * c > few:
        return []
    return [_products(left[sample, :, rows], right[sample]) for sample, rows in _product_chunks(left, right)]


def _projected_products(
    left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None, *, kept: Sequence[Tensor]
) -> Float[Tensor, "B I J z"]:
    out = left.new_empty(left.shape[0], left.shape[2], right.shape[2], len(weight))
    for n, (sample, rows) in enumerate(_product_chunks(left, right)):
        products = kept[n] if kept else _products(left[sample, :, rows], right[sample])
        own = out[sample, rows].view(-1, len(weight))
        if bias is None:
            torch.mm(products, weight.T, out=own)
        else:
            torch.addmm(bias, products, weight.T, out=own)
    return out if counts is None else out.div_(counts)


def _outer_product_gradients(saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of both operands, the weight and the bias; None for the counts. `saved`: these, and the products that were kept."""
    left, right, weight, bias, counts, *kept = saved
    (sequences, _, c), j = left.shape[1:], right.shape[2]
    chunks = list(_product_chunks(left, right))
    of_left = Whole(chunks, lambda: torch.empty_like(left, memory_format=torch.contiguous_format))
    of_right = [Sums(chunks, sample.flatten(1)) for sample in right]
    of_weight = Sums(chunks, weight)
    if counts is not None:
        grad = torch.div(grad, counts, out=torch.empty_like(grad, memory_format=torch.contiguous_format))
    of_bias = None if bias is None else grad.sum((0, 1, 2))
    for n, (sample, rows) in enumerate(chunks):
        products = kept[n] if kept else _products(left[sample, :, rows], right[sample])
        upstream = grad[sample, rows].flatten(0, 1)
        of_weight.add_linear(0, upstream, products)
        i = rows.stop - rows.start
        slope = (upstream @ weight).view(i, j, c, c).transpose(1, 2).reshape(i * c, j * c)
        of_left.put((sample, slice(None), rows), (right[sample].flatten(1) @ slope.T).view(sequences, i, c))
        of_right[sample].add_linear(0, left[sample, :, rows].flatten(1).T, slope)
    grad_right = [x for sums in of_right for x in sums.results()]
    whole = grad_right[0] if len(chunks) == 1 else torch.stack(grad_right)
    return of_left.x.view(left.shape), whole.view(right.shape), *of_weight.results(), of_bias, None


class _OuterProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None
    ) -> Tensor:
        kept = _kept_products(left, right, any(ctx.needs_input_grad))
        ctx.save_for_backward(left, right, weight, bias, counts, *kept)
        return _projected_products(left, right, weight, bias, counts, kept=kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _outer_product_gradients(ctx.saved_tensors, grad)


class _Shared:
    """What the two nodes of an outer product give each other."""

    products: Sequence[Tensor] = ()
    gradient: Tensor | None = None


class _Operands(torch.autograd.Function):
    """Saves what the backward pass needs, and computes the gradients when that of the product is there. Returns a token."""

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
        ctx.shared, shared.products = shared, _kept_products(left, right, any(ctx.needs_input_grad))
        ctx.save_for_backward(left, right, weight, bias, counts, *shared.products)
        ctx.set_materialize_grads(False)
        return left.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: None) -> tuple[Tensor | None, ...]:
        grad, ctx.shared.gradient = ctx.shared.gradient, None
        return None, *_outer_product_gradients(ctx.saved_tensors, grad)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, shared: _Shared, inputs: Sequence[Any]) -> Tensor:
        kept, shared.products = shared.products, ()
        ctx.shared = shared
        return _projected_products(*inputs, kept=kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.shared.gradient = grad
        return (None,) * 3  # the token's, too: `_Operands` is called all the same
