"""The operators' formulas, as AlphaFold2's supplement states them: the truth that every other backend is compared with.

They are written for reading, not for speed: autograd differentiates them, and nothing is computed piece by piece.

Shape legend: B batch, N rows of the outer axis (each attends within itself), H heads, Q queries, K keys, D head width, I J
residues of a pair, S sequences, c channels of an operand, z channels of the result.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

# Added to a logit, this removes its key from the softmax. If all keys are masked, the weights are uniform, as in AF2.
MASKED = -1e9


def mask_bias(mask: Float[Tensor, "*batch L"]) -> Float[Tensor, "*batch L"]:
    """Additive bias of keys: 0 where the mask is 1, -1e9 where it is 0."""
    return (1.0 - mask) * MASKED


def attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row (algorithm 8). `gate`: logits. `keys`: 1 where a key is present; gets no gradient."""
    return gate.sigmoid() * _attended(q, k, v, mask_bias(keys)[:, :, None, None, :])


def biased_attention(
    q: Float[Tensor, "B N Q H D"],
    k: Float[Tensor, "B N K H D"],
    v: Float[Tensor, "B N K H D"],
    gate: Float[Tensor, "B N Q H D"],
    keys: Float[Tensor, "B N K"],
    pair_bias: Float[Tensor, "B H Q K"],
) -> Float[Tensor, "B N Q H D"]:
    """Gated attention within each row, with a bias of the logits that all rows share (algorithms 7, 13 and 14)."""
    bias = mask_bias(keys)[:, :, None, None, :] + pair_bias.unsqueeze(1)
    return gate.sigmoid() * _attended(q, k, v, bias)


def _attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("bnhqk,bnkhd->bnqhd", logits.softmax(-1), v)


def gated_projection(
    x: Float[Tensor, "B I J c_z"],
    mask: Float[Tensor, "B I J"],
    weight: Float[Tensor, "cc c_z"],
    bias: Float[Tensor, " cc"],
    gate_weight: Float[Tensor, "cc c_z"],
    gate_bias: Float[Tensor, " cc"],
) -> Float[Tensor, "2 B c I J"]:
    """Both operands of triangle multiplication (algorithms 11 and 12, line 2), channels first: mask x sigmoid(gate) x value.

    `cc`: the channels of the first operand, then those of the second one. The mask gets no gradient.
    """
    values, gates = F.linear(x, weight, bias), F.linear(x, gate_weight, gate_bias)
    return (mask.unsqueeze(-1) * gates.sigmoid() * values).unflatten(-1, (2, -1)).permute(3, 0, 4, 1, 2).contiguous()


def transition(
    x: Float[Tensor, "*batch c"],
    widen: Float[Tensor, "h c"],
    widen_bias: Float[Tensor, " h"],
    narrow: Float[Tensor, "c h"],
    narrow_bias: Float[Tensor, " c"],
) -> Float[Tensor, "*batch c"]:
    """Two-layer perceptron (algorithms 9 and 15, lines 2 and 3)."""
    return F.linear(F.linear(x, widen, widen_bias).relu(), narrow, narrow_bias)


def outer_product(
    left: Float[Tensor, "B S I c"], right: Float[Tensor, "B S J c"], weight: Float[Tensor, "z cc"]
) -> Float[Tensor, "B I J z"]:
    """Sum over sequences of outer products, projected (algorithm 10, lines 3 and 4): weight vec(sum_s left_si right_sj^T).

    `cc`: c x c; the left operand's channel varies slower.
    """
    c = left.shape[-1]
    return torch.einsum("bsic,bsjd,zcd->bijz", left, right, weight.unflatten(-1, (c, c)))


def layer_norm(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, " c"], bias: Float[Tensor, " c"], eps: float = 1e-5
) -> Float[Tensor, "*batch c"]:
    """Each position's channels, shifted and scaled to mean 0 and variance 1, times a weight plus a bias."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
