"""Operations on the MSA representation (algorithms 7 to 10 and 19).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c channels, H heads, D head width. A small
letter (s r i j) is this rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.precision import without_autocast
from evodsp.model.primitives import GatedAttention, LayerNorm, Linear, PairBias, ShardedModule, project
from evodsp.parallel.exchange import LocalExchange
from evodsp.parallel.layout import Axis, shard_sizes
from evodsp.parallel.pending import Pending


class MSARowAttention(ShardedModule):
    """MSA row-wise gated self-attention with pair bias (algorithm 7). m on S, z on J."""

    def __init__(self, c_m: int, c_z: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.pair_norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads, head_width)

    def forward(
        self, m: Float[Tensor, "B s R c_m"], z: Float[Tensor, "B I j c_z"], msa_mask: Float[Tensor, "B S R"]
    ) -> Float[Tensor, "B s R c_m"]:
        # Only the bias, H channels, is communicated; z stays where it is.
        (local,) = project(self.kernels, z, self.pair_norm, self.pair_bias.layer, planes=1)
        bias = PairBias(local, "j", z.shape[1], self.exchange, self.plan)
        (projected,) = project(self.kernels, m, self.norm, self.attention.projection)
        return self.attention(projected, self.exchange.shard(msa_mask, "seq"), bias)


class MSAColumnAttention(ShardedModule):
    """MSA column-wise gated self-attention (algorithm 8). m on R, where each rank has whole columns."""

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads, head_width, along=1)

    def forward(
        self, m: Float[Tensor, "B S r c_m"], msa_mask: Float[Tensor, "B S R"], axis: Axis = "res"
    ) -> Float[Tensor, "B S r c_m"]:
        (projected,) = project(self.kernels, m, self.norm, self.attention.projection)
        return self.attention(projected, self.exchange.shard(msa_mask, axis))


class MSAColumnGlobalAttention(ShardedModule):
    """MSA column-wise gated attention with one global query per column (algorithm 19).

    With m on S, ranks exchange only sums over their sequences: first for the mean query, then the numerator and denominator of
    the softmax average with their shift. With m on R nothing is exchanged.
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

    def forward(
        self, m: Float[Tensor, "B s r c_m"], msa_mask: Float[Tensor, "B S R"], axis: Axis = "seq"
    ) -> Float[Tensor, "B s r c_m"]:
        """The update of m, which is sharded along `axis`."""
        mask = self.exchange.shard(msa_mask, axis)
        over_sequences = self.exchange if axis == "seq" else LocalExchange()
        layers = self.key_value, self.gate
        local, key_value, gate = self.kernels.pooled_projections(
            m, mask, self.norm.weight, self.norm.bias, [one.weight for one in layers], [one.bias for one in layers]
        )
        total = over_sequences.start_sum(local)  # [B, r, c_m]
        count = (msa_mask if axis == "seq" else mask).sum(1)  # [B, r]
        mean = total.wait() / (count.unsqueeze(-1) + 1e-10)
        q = self.query(mean.to(gate.dtype)).unflatten(-1, (self.heads, -1))  # [B, r, H, D]
        sums = self.kernels.global_attention(q, key_value.unflatten(-1, (2, -1)), mask)
        # Numerator and denominator of the softmax average over sequences: [B, r, H, D + 1].
        numerator, denominator = over_sequences.softmax_sums(sums).split((self.head_width, 1), -1)
        average = (numerator / denominator).flatten(-2).unsqueeze(1).to(gate.dtype)  # [B, 1, r, H D]
        return self.kernels.gated_linear(average, gate, self.output.weight, self.output.bias)


class OuterProductMean(ShardedModule):
    """Outer product mean (algorithm 10): the update of z on J.

    With m on R, the 32-channel operand of rows I is gathered. With m on S there are two ways (`CommunicationPlan`): gather that
    operand and switch the other one to R, or reduce partial sums over each rank's sequences, which moves fewer bytes where
    there are many sequences.
    """

    def __init__(self, c_m: int, c_z: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.norm = LayerNorm(c_m)
        self.left_right = Linear(c_m, 2 * channels)
        self.output = Linear(channels * channels, c_z, init="final")

    def forward(
        self, m: Float[Tensor, "B _ _ c_m"], msa_mask: Float[Tensor, "B S R"], axis: Axis = "res"
    ) -> Float[Tensor, "B I j c_z"]:
        """m is sharded along `axis`, S or R."""
        mask = self.exchange.shard(msa_mask, axis).unsqueeze(-1)
        (operands,) = project(self.kernels, m, self.norm, self.left_right.layer)
        mask = mask.to(operands.dtype)
        left, right = (operand * mask for operand in operands.chunk(2, -1))  # both sharded as m is, without gaps
        if axis == "res":
            rows = self.exchange.gather(left, "res", whole=msa_mask.shape[2])
            return self._mean(rows, right, msa_mask)
        return self._from_sequence_shards(left, right, msa_mask)

    def _mean(
        self, rows: Float[Tensor, "B S I c"], columns: Float[Tensor, "B S j c"], msa_mask: Float[Tensor, "B S R"]
    ) -> Float[Tensor, "B I j c_z"]:
        """From operands that have all sequences."""
        return self.kernels.outer_product(rows, columns, self.output.weight, self.output.bias, self.counts(msa_mask))

    def counts(self, msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B I j 1"]:
        """Number of sequences that have both residues, plus 0.001."""
        with without_autocast(msa_mask.device):  # half precision does not count beyond 256
            return (msa_mask.transpose(1, 2) @ self.exchange.shard(msa_mask, "res")).unsqueeze(-1) + 1e-3

    def _from_sequence_shards(
        self, left: Float[Tensor, "B s R c"], right: Float[Tensor, "B s R c"], msa_mask: Float[Tensor, "B S R"]
    ) -> Float[Tensor, "B I j c_z"]:
        """From operands sharded along S."""
        sequences, residues = msa_mask.shape[1:]
        if self.plan.sums_outer_products(
            sequences, residues, self.channels, self.output.out_features, self.exchange.ranks
        ):
            update = self.reduced(left, right, sequences)
            return _Quotient.apply(update + self.output.bias.to(update.dtype), self.counts(msa_mask))
        rows = self.exchange.start_gather(left, "seq", whole=sequences)
        columns = self.exchange.switch(right, "seq", "res", whole=sequences)
        return self._mean(rows.wait(), columns, msa_mask)

    def reduced(
        self, left: Float[Tensor, "B s R c"], right: Float[Tensor, "B s R c"], sequences: int
    ) -> Float[Tensor, "B I j c_z"]:
        """Partial sums over this rank's sequences, computed and reduced a few rows at a time. `sequences`: of all ranks."""
        residues, ranks = right.shape[2], self.exchange.ranks
        pieces = self.plan.pieces_of_partial_sums(sequences, residues, self.channels, self.output.out_features, ranks)
        updates: list[Tensor] = []
        reducing: Pending | None = None
        for rows in left.split(shard_sizes(residues, pieces), 2):
            partial = self.kernels.outer_product(rows, right, self.output.weight)
            if reducing is not None:  # at most one reduction is under way while the next partial sum is computed
                updates.append(reducing.wait())
            reducing = self.exchange.start_scatter_sum(partial, "j", whole=residues)
            del partial  # what is sent may be another copy
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
