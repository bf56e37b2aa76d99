"""Operations on the MSA representation (algorithms 7 to 10 and 19).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c channels, H heads, D head width. Small letters
s r i j are this rank's shard of an axis, which on one device is all of it. Masks are whole everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.kernels.outer_product import outer_product
from evodsp.model.primitives import GatedAttention, Linear, PairBias, ShardedModule, mask_bias
from evodsp.parallel.exchange import LocalExchange
from evodsp.parallel.pending import Pending


class MSARowAttention(ShardedModule):
    """MSA row-wise gated self-attention with pair bias (algorithm 7). m on S, z on J."""

    def __init__(self, c_m: int, c_z: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.pair_norm = nn.LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads, head_width)

    def forward(
        self, m: Float[Tensor, "B s R c_m"], z: Float[Tensor, "B I j c_z"], msa_mask: Float[Tensor, "B S R"]
    ) -> Float[Tensor, "B s R c_m"]:
        # H channels leave the rank: the large z itself stays where it is.
        bias = PairBias(self.pair_bias(self.pair_norm(z)), "j", z.shape[1], self.exchange, self.plan)
        return self.attention(self.norm(m), self.exchange.shard(msa_mask, "seq"), bias)


class MSAColumnAttention(ShardedModule):
    """MSA column-wise gated self-attention (algorithm 8). m on R."""

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads, head_width)

    def forward(self, m: Float[Tensor, "B S r c_m"], msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B S r c_m"]:
        mask = self.exchange.shard(msa_mask, "res")
        return self.attention(self.norm(m).transpose(1, 2), mask.transpose(1, 2)).transpose(1, 2)


class MSAColumnGlobalAttention(ShardedModule):
    """MSA column-wise gated attention with one global query per column (algorithm 19). m on `layout`.

    On S only sums over sequences leave the rank: the mean query, then the softmax's numerator and denominator. On R nothing.
    """

    def __init__(self, c_m: int, heads: int, head_width: int, layout: Literal["seq", "res"] = "seq") -> None:
        super().__init__()
        self.heads, self.head_width, self.layout = heads, head_width, layout
        width = heads * head_width
        self.norm = nn.LayerNorm(c_m)
        self.query = Linear(c_m, width, bias=False, init="glorot")
        self.key_value = Linear(c_m, 2 * head_width, bias=False, init="glorot", parts=2)
        self.gate = Linear(c_m, width, init="gate")
        self.output = Linear(width, c_m, init="final")

    def forward(self, m: Float[Tensor, "B s r c_m"], msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B s r c_m"]:
        x, mask = self.norm(m), self.exchange.shard(msa_mask, self.layout)
        over_shards = self.exchange if self.layout == "seq" else LocalExchange()
        total = over_shards.start_sum((x * mask.unsqueeze(-1)).sum(1))  # [B, r, c]
        k, v = self.key_value(x).transpose(1, 2).chunk(2, -1)  # [B, r, s, D], one head for all queries
        count = (msa_mask if self.layout == "seq" else mask).sum(1)
        mean = total.wait() / (count.unsqueeze(-1) + 1e-10)
        q = self.query(mean).unflatten(-1, (self.heads, -1)) * self.head_width**-0.5  # [B, r, H, D]
        logits = q @ k.transpose(-1, -2) + mask_bias(mask).transpose(1, 2).unsqueeze(2)  # [B, r, H, s]
        weight = (logits - over_shards.max(_highest(logits))).exp()
        # Numerator and denominator of the softmax's mean, in one sum over the shards.
        sums = over_shards.start_sum(torch.cat([weight @ v, weight.sum(-1, keepdim=True)], -1))
        gate = self.gate(x).sigmoid()
        numerator, denominator = sums.wait().split((self.head_width, 1), -1)
        return self.output((numerator / denominator).flatten(-2).unsqueeze(1) * gate)


class OuterProductMean(ShardedModule):
    """Outer product mean (algorithm 10). m on `layout`, the pair update on J.

    On R only the 32-channel operand of I is gathered. On S there are two ways: that operand is gathered and the other one
    switched to R, or partial sums over this rank's sequences are added up, which moves less where sequences are many.
    """

    def __init__(self, c_m: int, c_z: int, channels: int, layout: Literal["seq", "res"] = "res") -> None:
        super().__init__()
        self.layout, self.channels = layout, channels
        self.norm = nn.LayerNorm(c_m)
        self.left_right = Linear(c_m, 2 * channels)
        self.output = Linear(channels * channels, c_z, init="final")

    def forward(self, m: Float[Tensor, "B _ _ c_m"], msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B I j c_z"]:
        mask = self.exchange.shard(msa_mask, self.layout).unsqueeze(-1)
        left, right = (self.left_right(self.norm(m)) * mask).chunk(2, -1)  # on R or on S, like m
        count = msa_mask.transpose(1, 2) @ self.exchange.shard(
            msa_mask, "res"
        )  # [B, I, j] sequences with both residues
        update = self._summed(left, right, *msa_mask.shape[1:]) + self.output.bias
        return update / (count.unsqueeze(-1) + 1e-3)

    def _summed(
        self, left: Float[Tensor, "B _ _ c"], right: Float[Tensor, "B _ _ c"], sequences: int, residues: int
    ) -> Float[Tensor, "B I j c_z"]:
        """The projected outer product, summed over all sequences."""
        if self.layout == "res":
            return outer_product(self.exchange.gather(left, "res", whole=residues), right, self.output.weight)
        if self.plan.sums_outer_products(
            sequences, residues, self.channels, self.output.out_features, self.exchange.ranks
        ):
            return self._reduced(left, right)
        whole = self.exchange.start_gather(left, "seq", whole=sequences)
        columns = self.exchange.switch(right, "seq", "res", whole=sequences)
        return outer_product(whole.wait(), columns, self.output.weight)

    def _reduced(self, left: Float[Tensor, "B s R c"], right: Float[Tensor, "B s R c"]) -> Float[Tensor, "B I j c_z"]:
        """Partial sums over this rank's sequences, made and added up one output shard at a time."""
        residues = right.shape[2]
        shards = self.exchange.shards(residues)
        update: Tensor | float = 0.0
        under_way: Pending | None = None
        for root, columns in enumerate(shards):
            partial = outer_product(left, right[:, :, columns], self.output.weight)
            if under_way is not None:  # at most one is under way while the next is made
                update = update + under_way.wait()
            under_way = self.exchange.start_reduce(partial, "j", root, whole=residues)
        assert under_way is not None  # there is at least one shard
        return update + under_way.wait()


def first_row(m: Float[Tensor, "B S r c_m"]) -> Float[Tensor, "B r c_m"]:
    """The query's row. m on R: the row is then on every rank, for its residues."""
    return m[:, 0]


def _highest(logits: Float[Tensor, "B r H s"]) -> Float[Tensor, "B r H 1"]:
    """The largest logit, or the least number there is where a shard is empty."""
    least = logits.new_full((*logits.shape[:-1], 1), torch.finfo(logits.dtype).min)
    return torch.cat([logits.detach(), least], -1).amax(-1, keepdim=True)
