"""Residual updates in place and piece by piece: passes without gradients within a memory budget.

A sub-layer's intermediates are several times as large as its representation: a hidden layer has four times its channels,
queries, keys, values and gates as many again. But most sub-layers treat the rows (or columns) of a representation one by one.
So an update is computed for a few rows at a time and added where these rows lie; rows that have been changed are not read
again. What must be whole is made whole first: the bias of attention, and the product of triangle multiplication, which is as
large as the pair representation. Triangle multiplication is computed a few channels at a time, outer products a few rows.

The sub-layers are those that a training step runs, and so are their parameters and operators; only the loops are here. On
several ranks every rank makes the same number of pieces, because pieces may communicate.

Shape legend: B batch, n1 n2 this rank's axes of a representation, N1 N2 their total sizes, S sequences, R residues, I J
residues of the pair, c channels, H heads. A small letter (s r i j) is this rank's shard of that axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.msa_ops import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from evodsp.model.pair_ops import TriangleAttention, TriangleMultiplication
from evodsp.model.primitives import PairBias, ShardedModule, Transition, project
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.exchange import LocalExchange
from evodsp.parallel.layout import DIMENSION, Axis, shard_slice
from evodsp.parallel.pending import Pending

SWITCH_BUFFERS = 3
"""Shards that a switch needs besides its input: what is sent, what arrives, and that in the order of the result."""

Mask = Float[Tensor, "B N1 N2"]
MSAMask = Float[Tensor, "B S R"]
PairMask = Float[Tensor, "B R R"]


class Budgeted(ShardedModule):
    """A module that keeps to a memory budget in passes without gradients."""

    memory: int | None = None
    """Bytes for the intermediates of a sub-layer, on each rank; None: no limit, and nothing is computed in place."""
    samples: int | None = None
    """As in `Budget`."""

    @property
    def budget(self) -> Budget | None:
        """The budget of a pass without gradients; None: compute whole, and leave inputs as they are."""
        return (
            None
            if self.memory is None or torch.is_grad_enabled()
            else Budget(self.memory, self.exchange.ranks, self.samples)
        )


def use_memory(model: nn.Module, memory: int | None, samples: int | None = None) -> None:
    """Let passes of `model` without gradients and dropout compute in place, with `memory` bytes for a sub-layer's
    intermediates on each rank. A stack that is called by itself then overwrites its inputs. None: no limit.
    `samples`: as in `Budget`.
    """
    for module in model.modules():
        if isinstance(module, Budgeted):
            module.memory, module.samples = memory, samples


@dataclass(frozen=True)
class Budget:
    """How many pieces a representation is cut into."""

    memory: int
    """Bytes for the intermediates of a sub-layer."""
    ranks: int
    """Number of ranks that share a representation."""
    samples: int | None = None
    """Of a pass on tensors without numbers: how many pieces are computed. The others need the same memory."""

    def pieces(self, x: Float[Tensor, "B n1 n2 _"], dim: int, mask: Mask, width: int) -> list[slice]:
        """Slices of axis `dim` of `x`, so that `width` numbers like its own for each position fit into the memory.

        `mask`: of the whole representation of which `x` is a shard.
        """
        return self.cut(x.shape[dim], dim, mask, width * x.element_size())

    def cut(self, size: int, dim: int, mask: Mask, needed: int) -> list[slice]:
        """Slices of axis `dim`, of which this rank has `size` entries, so that `needed` bytes for each position fit.

        All ranks get the same number of slices, some of which may be empty.
        """
        most = mask.shape[dim] if size == mask.shape[dim] else mask.shape[dim] // self.ranks
        return self.equal(size, mask.numel() * needed / self.ranks, most)

    def channels(self, x: Float[Tensor, "B n1 n2 c"], positions: int) -> list[slice]:
        """Slices of the channels of a shard `x`, so that a switch of one of them fits. `positions`: B N1 N2."""
        shard = positions * x.shape[-1] * x.element_size() / self.ranks
        return self.equal(x.shape[-1], SWITCH_BUFFERS * shard, x.shape[-1])

    def equal(self, size: int, needed: int | float, most: int) -> list[slice]:
        """`size` entries, which need so many bytes, in pieces that fit: at most in `most`, and at least in one."""
        number = max(1, min(math.ceil(needed / self.memory), most))
        return [shard_slice(size, number, piece) for piece in range(number)][: self.samples]


def collected(
    make: Callable[[slice], Tensor], pieces: Sequence[slice], dim: int, size: int, into: Tensor | None = None
) -> Tensor:
    """What `make` returns for each of the pieces of axis `dim`, of `size` entries, in one tensor.

    `into`: the tensor to write, which `make` may read: a piece of it is overwritten when its own result is there.
    """
    if len(pieces) == 1 and into is None:
        return make(pieces[0])
    whole = into
    for piece in pieces:
        part = make(piece)
        if whole is None:
            whole = part.new_empty(*part.shape[:dim], size, *part.shape[dim + 1 :])
        whole[_at(dim, piece)] = part
        del part  # not held while the next one is made
    assert whole is not None  # there is at least one piece
    return whole


@singledispatch
def add_in_place(layer: nn.Module, target: Pending, mask: Mask, budget: Budget, *arguments: Any) -> None:
    """target += layer(*arguments), in place. `target`: a shard of a representation, perhaps on its way; `mask`: of the whole
    representation.

    Another kind of layer registers its own function here; one that does not is computed whole.
    """
    update = layer(*arguments)
    target.wait().add_(update)


@add_in_place.register(Transition)
def _transition(layer: Transition, target: Pending, mask: Mask, budget: Budget, *_: Any) -> None:
    x = target.wait()
    for rows in budget.pieces(x, 1, mask, _width(layer)):
        x[:, rows] += layer(x[:, rows])


@add_in_place.register(MSARowAttention)
def _row_attention(
    layer: MSARowAttention, target: Pending, mask: Mask, budget: Budget, m: Tensor, z: Tensor, msa_mask: MSAMask
) -> None:
    def bias_of(rows: slice) -> Tensor:
        return project(layer.kernels, z[:, rows], layer.pair_norm, layer.pair_bias.layer)[0]

    residues = z.shape[1]
    pair_pieces = budget.equal(residues, 2 * z.numel() * z.element_size(), residues)
    bias = _pair_bias(layer, collected(bias_of, pair_pieces, 1, residues), "j", budget)
    x, own_mask = target.wait(), layer.exchange.shard(msa_mask, "seq")
    attend = _attention(layer)
    for rows in budget.pieces(m, 1, msa_mask, _width(layer.attention)):
        x[:, rows] += attend(m[:, rows], own_mask[:, rows], bias)


@add_in_place.register(MSAColumnAttention)
def _column_attention(
    layer: MSAColumnAttention,
    target: Pending,
    mask: Mask,
    budget: Budget,
    m: Tensor,
    msa_mask: MSAMask,
    axis: Axis = "res",
) -> None:
    x, own_mask = target.wait(), layer.exchange.shard(msa_mask, axis)
    attend = _attention(layer)
    for columns in budget.pieces(m, 2, msa_mask, _width(layer.attention)):
        x[:, :, columns] += attend(m[:, :, columns], own_mask[:, :, columns])


@add_in_place.register(MSAColumnGlobalAttention)
def _global_attention(
    layer: MSAColumnGlobalAttention,
    target: Pending,
    mask: Mask,
    budget: Budget,
    m: Tensor,
    msa_mask: MSAMask,
    axis: Axis = "seq",
) -> None:
    """With m on S, where a rank has every column. With m on R (a plan that is not the default), all columns at once."""
    x = target.wait()
    pieces = budget.pieces(m, 2, msa_mask, _width(layer)) if axis == "seq" else [slice(0, msa_mask.shape[2])]
    for columns in pieces:
        x[:, :, columns] += layer(m[:, :, columns], msa_mask[:, :, columns], axis)


@add_in_place.register(OuterProductMean)
def _outer_product_mean(
    layer: OuterProductMean,
    target: Pending,
    mask: Mask,
    budget: Budget,
    m: Tensor,
    msa_mask: MSAMask,
    axis: Axis = "res",
) -> None:
    """The target is z. The operands are made of a few rows of m at a time, and z gets a few of its rows at a time."""
    x, own_mask = target.wait(), layer.exchange.shard(msa_mask, axis).unsqueeze(-1)

    def operands_of(rows: slice) -> Float[Tensor, "2 B s R c"]:
        (operands,) = project(layer.kernels, m[:, rows], layer.norm, layer.left_right.layer)
        operands *= own_mask[:, rows].to(operands.dtype)
        return operands.unflatten(-1, (2, layer.channels)).movedim(-2, 0)  # in one tensor, each is contiguous

    left, right = collected(operands_of, budget.pieces(m, 1, msa_mask, _width(layer)), 2, m.shape[1])
    sequences, residues = msa_mask.shape[1:]
    if axis == "seq" and budget.ranks > 1:
        if layer.plan.sums_outer_products(sequences, residues, layer.channels, x.shape[-1], budget.ranks):
            _add_mean(layer, x, layer.reduced(left, right, sequences), layer.counts(msa_mask))
            return
        left, right = (
            layer.exchange.gather(left, "seq", sequences),
            layer.exchange.switch(right, "seq", "res", sequences),
        )
    else:
        left = layer.exchange.gather(left, "res", residues)
    counts = layer.counts(msa_mask)
    for rows in budget.pieces(x, 1, mask, 2 * layer.channels**2 + 2 * x.shape[-1]):
        _add_mean(
            layer,
            x[:, rows],
            layer.kernels.outer_product(left[:, :, rows], right, layer.output.weight),
            counts[:, rows],
        )


@add_in_place.register(TriangleMultiplication)
def _triangle_multiplication(
    layer: TriangleMultiplication,
    target: Pending,
    mask: Mask,
    budget: Budget,
    z: Tensor,
    pair_mask: PairMask,
    axis: Axis = "j",
    result_axis: Axis | None = None,
    switched: Pending | None = None,
) -> None:
    """Operands of some channels, made of a few rows of z at a time, and their product; then the update, row by row.

    The target is z or, if z is on its way to another axis, what `switched` delivers.
    """
    half = replace(budget, memory=max(1, budget.memory // 2))  # for the operands, and for what they are made of
    own_mask = layer.exchange.shard(pair_mask, axis)
    linears = layer.projection, layer.projection_gate
    width = layer.channels

    def product_of(channels: slice) -> Tensor:
        parameters = [
            p.unflatten(0, (2, width))[:, channels].flatten(0, 1) for one in linears for p in (one.weight, one.bias)
        ]

        def operands_of(rows: slice) -> Tensor:
            return layer.kernels.gated_projection(
                z[:, rows], own_mask[:, rows], layer.norm.weight, layer.norm.bias, *parameters
            )

        rows = half.pieces(z, 1, pair_mask, z.shape[-1] + 4 * (channels.stop - channels.start))
        # The operands get no name, so that they are freed once they have been sent.
        return layer.multiply(
            collected(operands_of, rows, 3, z.shape[1]), axis, result_axis or axis, pair_mask.shape[1]
        ).wait()

    bytes_of_all = 4 * width * pair_mask.numel() * z.element_size() / budget.ranks
    most = max(1, width // budget.ranks)  # a piece has a channel for each rank; otherwise some would not compute
    product = collected(product_of, half.equal(width, bytes_of_all, most), 3, width)
    x, norm, output = target.wait(), layer.product_norm, layer.output
    for rows in budget.pieces(x, 1, mask, _width(layer)):
        part = x[:, rows]
        (gate,) = project(layer.kernels, part, layer.norm, layer.output_gate.layer)
        part += layer.kernels.gated_output(product[:, rows], gate, norm.weight, norm.bias, output.weight, output.bias)


@add_in_place.register(TriangleAttention)
def _triangle_attention(
    layer: TriangleAttention, target: Pending, mask: Mask, budget: Budget, z: Tensor, pair_mask: PairMask
) -> None:
    axis: Axis = "i" if layer.node == "starting" else "j"
    dim = DIMENSION[axis]
    x, own_mask = target.wait(), layer.exchange.shard(pair_mask, axis)

    def bias_of(piece: slice) -> Tensor:
        return project(layer.kernels, z[_at(dim, piece)], layer.norm, layer.pair_bias.layer)[0]

    pieces = budget.pieces(z, dim, pair_mask, _width(layer))
    logits = collected(bias_of, pieces, dim, z.shape[dim])
    bias = _pair_bias(layer, logits if dim == 1 else logits.transpose(1, 2), "i", budget)
    attend = _attention(layer)
    for piece in pieces:
        at = _at(dim, piece)
        x[at] += attend(z[at], own_mask[at], bias)


def _attention(layer: MSARowAttention | MSAColumnAttention | TriangleAttention) -> Callable[..., Tensor]:
    """Attention of some rows of a representation. Its weights are put together once, for all pieces."""
    projection = layer.attention.projection

    def attend(x: Tensor, mask: Tensor, *bias: PairBias) -> Tensor:
        (projected,) = project(layer.kernels, x, layer.norm, projection)
        return layer.attention(projected, mask, *bias)

    return attend


def _add_mean(layer: OuterProductMean, x: Tensor, total: Tensor, counts: Tensor) -> None:
    """x += the mean, from the sum of outer products over `counts` sequences."""
    x += total.add_(layer.output.bias.to(total.dtype)).div_(counts)


def _pair_bias(
    layer: MSARowAttention | TriangleAttention, local: Float[Tensor, "B _ _ H"], axis: Axis, budget: Budget
) -> PairBias:
    """The bias of all pieces of attention: gathered once or, if the plan says so or the budget does not hold it, broadcast
    again for each piece.

    `local`: this rank's shard along `axis`.
    """
    whole, exchange = local.shape[1 if axis == "j" else 2], layer.exchange
    number = local.shape[0] * whole**2 * local.shape[-1]
    if budget.ranks == 1 or not (layer.plan.stream_bias or number * local.element_size() > budget.memory):
        return PairBias(exchange.gather(local, axis, whole), axis, whole, LocalExchange(), CommunicationPlan())
    rows = exchange.switch(local, "j", "i", whole) if axis == "j" else local
    return PairBias(rows, "i", whole, exchange, replace(layer.plan, stream_bias=True))


def _width(layer: nn.Module) -> int:
    """Numbers that `layer` makes for each position: all norms, all linear layers, and what goes into the widest of these."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    norms = [module for module in layer.modules() if isinstance(module, nn.LayerNorm)]
    return (
        sum(one.out_features for one in linears)
        + sum(one.normalized_shape[0] for one in norms)
        + max(one.in_features for one in linears)
    )


def _at(dim: int, piece: slice) -> tuple[slice, ...]:
    """The index of a piece of axis `dim`."""
    return (slice(None),) * dim + (piece,)
