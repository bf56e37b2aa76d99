"""The operators' formulas, as AlphaFold2's supplement states them: the truth that every other backend is compared with.

They are written to be read, not for speed: autograd differentiates them, and nothing is computed piece by piece.

Shape legend: B batch, N rows of the outer axis (each attends within itself), H heads, L positions, Q queries, D head width, I J
residues of a pair, S sequences, n1 n2 axes of a shard of a representation, c channels of an operand, z channels of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from evodsp.model.precision import mask_bias
from evodsp.rng import key_words, philox4x32

LOG2_E = math.log2(math.e)


def attention(projected: Float[Tensor, "B N L 4 H D"], keys: Float[Tensor, "B N L"]) -> Float[Tensor, "B N L H D"]:
    """Gated attention within each row (algorithm 8). `projected`: queries, keys, values and logits of the gate.

    `keys`: 1 where a key is present; it gets no gradient.
    """
    return _attended(projected, mask_bias(keys)[:, :, None, None, :], slice(None))


def biased_attention(
    projected: Float[Tensor, "B N L 4 H D"],
    keys: Float[Tensor, "B N L"],
    pair_bias: Float[Tensor, "B H Q L"],
    first: int = 0,
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row, with a bias of the logits that all rows share (algorithms 7, 13 and 14).

    Only the Q positions from number `first` on attend.
    """
    bias = mask_bias(keys)[:, :, None, None, :] + pair_bias.unsqueeze(1)
    return _attended(projected, bias, slice(first, first + pair_bias.shape[2]))


def _attended(projected: Tensor, bias: Tensor, queries: slice) -> Tensor:
    q, k, v, gate = projected.unbind(3)
    q, gate = q[:, :, queries], gate[:, :, queries]
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) * q.shape[-1] ** -0.5 + bias
    return gate.sigmoid() * torch.einsum("bnhqk,bnkhd->bnqhd", logits.softmax(-1), v)


def global_attention(
    q: Float[Tensor, "B r H D"], key_value: Float[Tensor, "B s r 2 D"], keys: Float[Tensor, "B s r"]
) -> Float[Tensor, "B r H D2"]:
    """Attention of one query per column and head over the sequences of a shard (algorithm 19, line 5), not yet divided.

    The result has D2 = D + 2 channels, in float32 at least: the sums over sequences of 2^(logit - shift) x value [D] and of
    2^(logit - shift), then the shift, which counts as a constant. The shift is the largest logit, or the smallest number if
    there are no sequences. Logits are those of a usual softmax times log2(e), because GPUs compute powers of two.
    `Exchange.softmax_sums` adds such sums of shards.

    All heads share keys and values. `keys`: 1 where a sequence is present; it gets no gradient.
    """
    k, v = key_value.unbind(3)
    bias = mask_bias(keys).transpose(1, 2).unsqueeze(2)
    logits = (torch.einsum("brhd,bsrd->brhs", q, k) * q.shape[-1] ** -0.5 + bias) * LOG2_E
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    least = logits.new_full((*logits.shape[:-1], 1), torch.finfo(logits.dtype).min)
    shift = torch.cat([logits.detach(), least], -1).amax(-1, keepdim=True)
    weights = (logits - shift).exp2()
    numerator = torch.einsum("brhs,bsrd->brhd", weights, v.to(weights.dtype))
    return torch.cat([numerator, weights.sum(-1, keepdim=True), shift], -1)


def dropout_add(
    x: Float[Tensor, "B n1 n2 c"],
    update: Float[Tensor, "B n1 n2 c"],
    keys: Int64[Tensor, " B"],
    rate: float,
    offsets: tuple[int, int],
    whole: tuple[int, int],
    shared_dim: int,
) -> Float[Tensor, "B n1 n2 c"]:
    """x + update * keep / (1 - rate), scaled and added in fp32 at least, in the dtype of x (supplement 1.11.6).

    A position is kept if its uniform number (`Draws.uniform_at`) is at least the rate. Positions are counted in the mask of
    the WHOLE representation, which is constant along `shared_dim` (1 or 2). `whole`: sizes of axes 1 and 2 over all shards;
    `offsets`: where this shard begins. `keys`: key of each sample's stream (`Draws.signed_key`).
    """
    sizes = [*whole, x.shape[-1]]
    sizes[shared_dim - 1] = 1
    positions = torch.arange(math.prod(sizes), device=x.device)
    words = philox4x32((positions, 0, 0, 0), key_words(keys.unsqueeze(-1)))[0]
    keep = ((words >> 8) * (1.0 / (1 << 24)) >= rate).view(len(keys), *sizes)
    other = 3 - shared_dim
    keep = keep.narrow(other, offsets[other - 1], x.shape[other])
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + update.to(wide) * keep / (1.0 - rate)).to(x.dtype)


def projections(
    x: Float[Tensor, "B n1 n2 c"],
    norm_weight: Float[Tensor, " c"],
    norm_bias: Float[Tensor, " c"],
    weights: Sequence[Float[Tensor, "_ c"]],
    biases: Sequence[Float[Tensor, " _"] | None],
    planes: int = 0,
) -> tuple[Tensor, ...]:
    """Linear layers of the layer norm of x. The results of the last `planes` layers have channels first, [B p n1 n2].

    A bias that is shorter than a layer's result belongs to the last channels.
    """
    y = layer_norm(x, norm_weight, norm_bias)
    results = [
        F.linear(y, weight) if bias is None else F.linear(y, weight, F.pad(bias, (len(weight) - len(bias), 0)))
        for weight, bias in zip(weights, biases, strict=True)
    ]
    last = len(results) - planes
    return *results[:last], *(result.permute(0, 3, 1, 2) for result in results[last:])


def pooled_projections(
    x: Float[Tensor, "B s r c"],
    mask: Float[Tensor, "B s r"],
    norm_weight: Float[Tensor, " c"],
    norm_bias: Float[Tensor, " c"],
    weights: Sequence[Float[Tensor, "_ c"]],
    biases: Sequence[Float[Tensor, " _"] | None],
) -> tuple[Tensor, ...]:
    """The sum of the layer norm of x over the sequences whose mask is 1 [B r c], in float32 at least; then `projections`
    (algorithm 19, lines 1 to 4). The mask gets no gradient.
    """
    y = layer_norm(x, norm_weight, norm_bias)
    total = (y * mask.unsqueeze(-1)).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    return total, *projections(x, norm_weight, norm_bias, weights, biases)


def gated_linear(
    x: Float[Tensor, "B 1 r c"],
    gate: Float[Tensor, "B s r c"],
    weight: Float[Tensor, "o c"],
    bias: Float[Tensor, " o"],
) -> Float[Tensor, "B s r o"]:
    """A linear layer of x times the sigmoid of `gate`, with one x for all sequences (algorithm 19, lines 6 and 7)."""
    return F.linear(gate.sigmoid() * x, weight, bias)


def linear(
    x: Float[Tensor, "B n1 n2 c"], weight: Float[Tensor, "o c"], bias: Float[Tensor, " o"]
) -> Float[Tensor, "B n1 n2 o"]:
    """A linear layer: the output layer of attention (algorithms 7, 8, 13 and 14)."""
    return F.linear(x, weight, bias)


def gated_projection(
    x: Float[Tensor, "B I J c_z"],
    mask: Float[Tensor, "B I J"],
    norm_weight: Float[Tensor, " c_z"],
    norm_bias: Float[Tensor, " c_z"],
    weight: Float[Tensor, "cc c_z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc c_z"],
    gate_bias: Float[Tensor, " cc"],
) -> Float[Tensor, "2 B c I J"]:
    """Both operands of triangle multiplication (algorithms 11 and 12, lines 1 and 2), channels first.

    An operand is mask x sigmoid(gate) x value, projected from the layer norm of x. `cc`: the channels of the first operand,
    then the channels of the second one. The mask gets no gradient.
    """
    y = layer_norm(x, norm_weight, norm_bias)
    values, gates = F.linear(y, weight, bias), F.linear(y, gate_weight, gate_bias)
    return (mask.unsqueeze(-1) * gates.sigmoid() * values).unflatten(-1, (2, -1)).permute(3, 0, 4, 1, 2).contiguous()


def triangle_multiplication(
    x: Float[Tensor, "B I J c_z"],
    mask: Float[Tensor, "B I J"],
    norm_weight: Float[Tensor, " c_z"],
    norm_bias: Float[Tensor, " c_z"],
    weight: Float[Tensor, "cc c_z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc c_z"],
    gate_bias: Float[Tensor, " cc"],
    output_gate_weight: Float[Tensor, "c_z c_z"],
    output_gate_bias: Float[Tensor, " c_z"],
    product_norm_weight: Float[Tensor, " c"],
    product_norm_bias: Float[Tensor, " c"],
    output_weight: Float[Tensor, "c_z c"],
    output_bias: Float[Tensor, " c_z"],
    outgoing: bool,
    drawn: Int64[Tensor, " B"] | None = None,
    rate: float = 0.0,
    shared_dim: int = 1,
) -> Float[Tensor, "B I J c_z"]:
    """A whole representation plus its update by triangle multiplication (algorithms 11 and 12), under dropout if there are
    keys, `drawn`. They, `rate` and `shared_dim` are those of `dropout_add`.

    Both operands of `gated_projection` are multiplied and summed over the third residue; `gated_output` is the rest.
    """
    a, b = gated_projection(x, mask, norm_weight, norm_bias, weight, bias, gate_weight, gate_bias)
    product = torch.einsum("bcik,bcjk->bcij" if outgoing else "bckj,bcki->bcij", a, b)
    gate, product_norm = (output_gate_weight, output_gate_bias), (product_norm_weight, product_norm_bias)
    parameters = norm_weight, norm_bias, *gate, *product_norm, output_weight, output_bias
    dropout = drawn, rate, (0, 0), (x.shape[1], x.shape[2]), shared_dim
    return gated_output(x, product.permute(0, 2, 3, 1), *parameters, *dropout)


def gated_output(
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
    drawn: Int64[Tensor, " B"] | None = None,
    rate: float = 0.0,
    offsets: tuple[int, int] = (0, 0),
    whole: tuple[int, int] = (0, 0),
    shared_dim: int = 1,
) -> Float[Tensor, "B n1 n2 z"]:
    """x plus its update by a product of triangles, under dropout if there are keys, `drawn` (algorithms 11 and 12, line 4).

    The update is a linear layer of the layer norm of the product, times the sigmoid of a gate, which is a linear layer of the
    layer norm of x. `drawn` to `shared_dim`: those of `dropout_add`.
    """
    gate = F.linear(layer_norm(x, norm_weight, norm_bias), gate_weight, gate_bias)
    update = gate.sigmoid() * F.linear(layer_norm(product, product_norm_weight, product_norm_bias), weight, bias)
    return x + update if drawn is None else dropout_add(x, update, drawn, rate, offsets, whole, shared_dim)


def transition(
    x: Float[Tensor, "B n1 n2 c"],
    norm_weight: Float[Tensor, " c"],
    norm_bias: Float[Tensor, " c"],
    widen: Float[Tensor, "h c"],
    widen_bias: Float[Tensor, " h"],
    narrow: Float[Tensor, "c h"],
    narrow_bias: Float[Tensor, " c"],
) -> Float[Tensor, "B n1 n2 c"]:
    """Layer norm and two-layer perceptron (algorithms 9 and 15)."""
    return F.linear(F.linear(layer_norm(x, norm_weight, norm_bias), widen, widen_bias).relu(), narrow, narrow_bias)


def outer_product(
    left: Float[Tensor, "B S I c"],
    right: Float[Tensor, "B S J c"],
    weight: Float[Tensor, "z cc"],
    bias: Float[Tensor, " z"] | None = None,
    counts: Float[Tensor, "B I J 1"] | None = None,
) -> Float[Tensor, "B I J z"]:
    """Sum over sequences of outer products, projected (algorithm 10, lines 3 and 4): weight vec(sum_s left_si right_sj^T).

    `cc`: c x c; the left operand's channel varies slower. With `bias` and `counts` the result is (sum + bias) / counts.
    """
    c = left.shape[-1]
    product = torch.einsum("bsic,bsjd,zcd->bijz", left, right, weight.unflatten(-1, (c, c)))
    return product if bias is None or counts is None else ((product + bias) / counts).to(product.dtype)


def layer_norm(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, " c"], bias: Float[Tensor, " c"], eps: float = 1e-5
) -> Float[Tensor, "*batch c"]:
    """The channels of each position, shifted and scaled to mean 0 and variance 1, times a weight plus a bias, in the dtype of
    x.
    """
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)
