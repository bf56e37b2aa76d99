"""Operations on the MSA representation (algorithms 7 to 10 and 19).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c channels, H heads, D head width.
Layouts, on one device all whole: row attention and global column attention have m on S, the others have m on R.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.primitives import GatedAttention, Linear, ShardedModule, mask_bias


class MSARowAttention(ShardedModule):
    """MSA row-wise gated self-attention with pair bias (algorithm 7). m on S, z on J."""

    def __init__(self, c_m: int, c_z: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.pair_norm = nn.LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads, head_width)

    def forward(
        self, m: Float[Tensor, "B S R c_m"], z: Float[Tensor, "B I J c_z"], msa_mask: Float[Tensor, "B S R"]
    ) -> Float[Tensor, "B S R c_m"]:
        bias = self.exchange.gather(self.pair_bias(self.pair_norm(z)), "j")  # [B, R, R, H]: the large z itself stays
        return self.attention(self.norm(m), msa_mask, bias.permute(0, 3, 1, 2))


class MSAColumnAttention(nn.Module):
    """MSA column-wise gated self-attention (algorithm 8). m on R."""

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads, head_width)

    def forward(self, m: Float[Tensor, "B S R c_m"], msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B S R c_m"]:
        return self.attention(self.norm(m).transpose(1, 2), msa_mask.transpose(1, 2)).transpose(1, 2)


class MSAColumnGlobalAttention(ShardedModule):
    """MSA column-wise gated attention with one global query per column (algorithm 19). m on S.

    Only sums over S leave the shard: the mean query, then the softmax's numerator and denominator.
    """

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        width = heads * head_width
        self.norm = nn.LayerNorm(c_m)
        self.query = Linear(c_m, width, bias=False, init="glorot")
        self.key_value = Linear(c_m, 2 * head_width, bias=False, init="glorot", parts=2)
        self.gate = Linear(c_m, width, init="gate")
        self.output = Linear(width, c_m, init="final")

    def forward(self, m: Float[Tensor, "B S R c_m"], msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B S R c_m"]:
        x = self.norm(m)
        mask = msa_mask.unsqueeze(-1)
        mean = self.exchange.sum((x * mask).sum(1)) / (self.exchange.sum(mask.sum(1)) + 1e-10)  # [B, R, c]
        q = self.query(mean).unflatten(-1, (self.heads, -1)) * self.head_width**-0.5  # [B, R, H, D]
        k, v = self.key_value(x).transpose(1, 2).chunk(2, -1)  # [B, R, S, D], one head for all queries
        logits = q @ k.transpose(-1, -2) + mask_bias(msa_mask).transpose(1, 2).unsqueeze(2)  # [B, R, H, S]
        weight = (logits - self.exchange.max(logits.amax(-1, keepdim=True))).exp()
        total = self.exchange.sum(weight.sum(-1, keepdim=True))
        o = self.exchange.sum(weight @ v) / total  # [B, R, H, D]
        return self.output(o.flatten(-2).unsqueeze(1) * self.gate(x).sigmoid())


class OuterProductMean(ShardedModule):
    """Outer product mean (algorithm 10). m on R in, the pair update on J out: only the I operand is gathered."""

    def __init__(self, c_m: int, c_z: int, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.left_right = Linear(c_m, 2 * channels)
        self.output = Linear(channels * channels, c_z, init="final")

    def forward(self, m: Float[Tensor, "B S R c_m"], msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B I J c_z"]:
        mask = msa_mask.unsqueeze(-1)
        left, right = (self.left_right(self.norm(m)) * mask).chunk(2, -1)  # [B, S, R, c]
        left, left_mask = self.exchange.gather(left, "res"), self.exchange.gather(mask, "res")
        count = left_mask.squeeze(-1).transpose(1, 2) @ msa_mask  # [B, I, J] sequences with both residues
        b, _, i, c = left.shape
        j = right.shape[2]
        # One matrix product over the sequences, then one over both channel axes: no einsum path search in a hot loop.
        outer = left.flatten(2).transpose(1, 2) @ right.flatten(2)  # [B, I*c, J*c]
        outer = outer.view(b, i, c, j, c).transpose(2, 3).reshape(b, i, j, c * c)
        return self.output(outer) / (count.unsqueeze(-1) + 1e-3)


def first_row(m: Float[Tensor, "B S R c_m"]) -> Float[Tensor, "B R c_m"]:
    """The query's row. m on R: the row is then on every rank, for its residues."""
    return m[:, 0]
