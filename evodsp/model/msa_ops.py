"""Operations on the MSA representation (algorithms 7 to 10 and 19).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c channels, H heads, D head width. A small
letter (s r i j) is this rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.precision import without_autocast
from evodsp.model.primitives import (
    GatedAttention,
    LayerNorm,
    Linear,
    PairBias,
    SubLayer,
    project,
    project_rows,
    working_width,
)
from evodsp.model.sharded import Sharded, Update
from evodsp.parallel.collectives import Axis, shard_sizes
from evodsp.parallel.exchange import Exchange, LocalExchange, Pending


class MSARowAttention(SubLayer):
    """MSA row-wise gated self-attention with pair bias (algorithm 7). m is on S, z on J."""

    takes, reads, shared_axis = ("seq",), ("j",), "seq"

    def __init__(self, c_m: int, c_z: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.pair_norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads, head_width)

    def bias(self, pair: Sharded) -> PairBias:
        """The bias of attention. Only it, H channels, is communicated; z stays where it is."""
        local = pair.collect(self._bias, pair.x, width=2 * pair.x.shape[-1])
        return PairBias(local, "j", pair, self.plan)

    def forward(self, msa: Sharded, bias: PairBias) -> Update:
        """The update of m. `bias`: result of `bias`, perhaps still on its way."""
        layer = self.attention.projection
        return self.attention.update(msa, self.norm, layer, project_rows(self.kernels, msa, self.norm, layer), bias)

    def _bias(self, z: Float[Tensor, "B I j c_z"]) -> Float[Tensor, "B I j H"]:
        return project(self.kernels, z, self.pair_norm, self.pair_bias.layer, planes=1)[0]


class MSAColumnAttention(SubLayer):
    """MSA column-wise gated self-attention (algorithm 8). m is on R, where each rank has whole columns."""

    takes = ("res",)

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads, head_width, along=1)

    def forward(self, msa: Sharded) -> Update:
        layer = self.attention.projection
        return self.attention.update(msa, self.norm, layer, project_rows(self.kernels, msa, self.norm, layer))


class MSAColumnGlobalAttention(SubLayer):
    """MSA column-wise gated attention with one global query per column (algorithm 19).

    With m on S, ranks exchange only sums over their sequences: first the sum for the mean query, then the numerator and
    denominator of the softmax average with their shift. With m on R nothing is exchanged.
    """

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        width = heads * head_width
        self.norm = LayerNorm(c_m)
        self.query = Linear(c_m, width, bias=False, init="glorot")
        self.key_value = Linear(c_m, 2 * head_width, bias=False, init="glorot", parts=2)
        self.gate = Linear(c_m, width, init="gate")
        self.output = Linear(width, c_m, init="final")
        self.working_width = working_width(self)

    @property
    def takes(self) -> tuple[Axis, ...]:
        return (self.plan.extra_msa_axis,)

    def forward(self, msa: Sharded) -> Update:
        """The update of m, which is on S or on R."""
        sharded = msa.axis == "seq"
        over_sequences = self.exchange if sharded else LocalExchange()
        count = (msa.mask if sharded else msa.own_mask).sum(1, keepdim=True)
        columns = partial(self._columns, over_sequences)
        return msa.update(columns, msa.x, msa.own_mask, count, width=self.working_width, dim=2)

    def _columns(
        self,
        over_sequences: Exchange,
        m: Float[Tensor, "B s r c_m"],
        mask: Float[Tensor, "B s r"],
        count: Float[Tensor, "B 1 r"],
    ) -> Float[Tensor, "B s r c_m"]:
        """The update of some columns. `count`: number of sequences in each column, over all ranks."""
        layers = self.key_value, self.gate
        local, key_value, gate = self.kernels.pooled_projections(
            m, mask, self.norm.weight, self.norm.bias, [one.weight for one in layers], [one.bias for one in layers]
        )
        total = over_sequences.start_sum(local)  # [B, r, c_m]
        mean = total.wait() / (count.squeeze(1).unsqueeze(-1) + 1e-10)
        q = self.query(mean.to(gate.dtype)).unflatten(-1, (self.heads, -1))  # [B, r, H, D]
        sums = self.kernels.global_attention(q, key_value.unflatten(-1, (2, -1)), mask)
        # Numerator and denominator of the softmax average over sequences: [B, r, H, D + 1].
        numerator, denominator = over_sequences.softmax_sums(sums).split((self.head_width, 1), -1)
        average = (numerator / denominator).flatten(-2).unsqueeze(1).to(gate.dtype)  # [B, 1, r, H D]
        return self.kernels.gated_linear(average, gate, self.output.weight, self.output.bias)


class OuterProductMean(SubLayer):
    """Outer product mean (algorithm 10): the update of z on J.

    With m on R, the 32-channel operand of rows I is gathered. With m on S there are two ways (`CommunicationPlan`): gather that
    operand and switch the other one to R, or reduce partial sums over each rank's sequences, which moves fewer bytes where
    there are many sequences.
    """

    takes, leaves = ("seq", "res"), ("j",)

    def __init__(self, c_m: int, c_z: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.norm = LayerNorm(c_m)
        self.left_right = Linear(c_m, 2 * channels)
        self.output = Linear(channels * channels, c_z, init="final")
        self.working_width = working_width(self)
        self.working_width_of_pairs = 2 * channels**2 + 3 * c_z

    def forward(self, msa: Sharded) -> Update:
        """The update of z. m is sharded along S or R."""
        mask = msa.own_mask.unsqueeze(-1)
        left, right = msa.collect(self._operands, msa.x, mask, width=self.working_width)  # sharded as m is
        counts = self.counts(msa.mask)
        sequences, residues = msa.total_sizes
        channels, c_z, ranks = self.channels, self.output.out_features, self.exchange.ranks
        if msa.axis == "seq" and self.plan.sums_outer_products(sequences, residues, channels, c_z, ranks):
            total = self._reduced(left, right, sequences)
            return msa.update(self._mean_of_sums, total, counts, width=2 * c_z)
        if msa.axis == "seq":
            moving = self.exchange.start_gather(left, "seq", whole=sequences)
            right = self.exchange.switch(right, "seq", "res", whole=sequences)
            left = moving.wait()
        else:
            left = self.exchange.gather(left, "res", whole=residues)
        mean = partial(self._mean, right)
        return msa.update(mean, left.transpose(1, 2), counts, width=self.working_width_of_pairs)

    def _operands(
        self, m: Float[Tensor, "B _ _ c_m"], mask: Float[Tensor, "B _ _ 1"]
    ) -> tuple[Float[Tensor, "B _ _ c"], Float[Tensor, "B _ _ c"]]:
        """Both operands, each with contiguous channels."""
        (both,) = project(self.kernels, m, self.norm, self.left_right.layer)
        mask = mask.to(both.dtype)
        left, right = (operand * mask for operand in both.chunk(2, -1))
        return left, right

    def _mean(
        self, columns: Float[Tensor, "B S j c"], rows: Float[Tensor, "B I S c"], counts: Float[Tensor, "B I j 1"]
    ) -> Float[Tensor, "B I j c_z"]:
        """The outer product mean from operands that hold all sequences."""
        left = rows.transpose(1, 2)
        return self.kernels.outer_product(left, columns, self.output.weight, self.output.bias, counts)

    def _mean_of_sums(
        self, total: Float[Tensor, "B I j c_z"], counts: Float[Tensor, "B I j 1"]
    ) -> Float[Tensor, "B I j c_z"]:
        """The outer product mean from projected outer products that are already summed over all sequences."""
        return _Quotient.apply(total + self.output.bias.to(total.dtype), counts)

    def counts(self, msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B I j 1"]:
        """Number of sequences that have both residues, plus 0.001."""
        with without_autocast(msa_mask.device):  # half precision does not count beyond 256
            return (msa_mask.transpose(1, 2) @ self.exchange.shard(msa_mask, "res")).unsqueeze(-1) + 1e-3

    def _reduced(
        self, left: Float[Tensor, "B s R c"], right: Float[Tensor, "B s R c"], sequences: int
    ) -> Float[Tensor, "B I j c_z"]:
        """Partial sums over this rank's sequences, computed and reduced a few rows at a time. `sequences`: number of
        sequences over all ranks.
        """
        residues, ranks = right.shape[2], self.exchange.ranks
        pieces = self.plan.pieces_of_partial_sums(sequences, residues, self.channels, self.output.out_features, ranks)
        updates: list[Tensor] = []
        reducing: Pending | None = None
        for rows in left.split(shard_sizes(residues, pieces), 2):
            partial = self.kernels.outer_product(rows, right, self.output.weight)
            if reducing is not None:  # at most one reduction is under way while the next partial sum is computed
                updates.append(reducing.wait())
            reducing = self.exchange.start_scatter_sum(partial, "j", whole=residues)
            del partial  # the collective may have sent a copy
        assert reducing is not None  # there is at least one piece
        updates.append(reducing.wait())
        return torch.cat(updates, 1)


class _Quotient(torch.autograd.Function):
    """x / count in the precision of x, and so is the gradient, although the count is in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return torch.div(x, count, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (count,) = ctx.saved_tensors
        return torch.div(grad, count, out=torch.empty_like(grad)), None


def first_row(m: Float[Tensor, "B S r c_m"]) -> Float[Tensor, "B r c_m"]:
    """The query's row of m. With m on R every rank has it, for its own residues."""
    return m[:, 0]
