"""Evoformer and extra-MSA stacks (algorithms 6 and 18).

Shape legend: B batch, S sequences, R residues, I J residues of the pair.
Layout: a block is entered and left with m on S and z on J; the last block leaves m on R, where its first row is.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.config import EvoformerConfig
from evodsp.model.msa_ops import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from evodsp.model.pair_ops import TriangleAttention, TriangleMultiplication
from evodsp.model.primitives import Dropout, ShardedModule, Transition
from evodsp.rng import Draws

MSA = Float[Tensor, "B S R c_m"]
Pair = Float[Tensor, "B I J c_z"]


class PairStack(ShardedModule):
    """The pair half of a block (algorithm 6, lines 6 to 10). z on J in and out."""

    def __init__(self, c_z: int, config: EvoformerConfig) -> None:
        super().__init__()
        self.triangle_outgoing = TriangleMultiplication(c_z, config.triangle_channels, "outgoing")
        self.triangle_incoming = TriangleMultiplication(c_z, config.triangle_channels, "incoming")
        self.attention_starting = TriangleAttention(c_z, config.pair_heads, config.pair_head_width, "starting")
        self.attention_ending = TriangleAttention(c_z, config.pair_heads, config.pair_head_width, "ending")
        self.transition = Transition(c_z, config.transition_factor)
        self.dropout_multiplication = Dropout(config.pair_dropout, shared="i", sharded="j")
        self.dropout_starting = Dropout(config.pair_dropout, shared="i", sharded="i")
        self.dropout_ending = Dropout(config.pair_dropout, shared="j", sharded="j")

    def forward(self, z: Pair, pair_mask: Float[Tensor, "B I J"], draws: Sequence[Draws] = ()) -> Pair:
        whole = (z.shape[1], z.shape[1])  # z is on J, so I is whole, and the pair is square
        outgoing, incoming, starting, ending = ([d.at(name) for d in draws] for name in ("out", "in", "start", "end"))
        z = z + self.dropout_multiplication(self.triangle_outgoing(z, pair_mask), outgoing, whole)
        z = z + self.dropout_multiplication(self.triangle_incoming(z, pair_mask), incoming, whole)
        z, rows_mask = self._switch(z, pair_mask)
        z = z + self.dropout_starting(self.attention_starting(z, rows_mask), starting, whole)
        z = self.exchange.switch(z, "i", "j")
        z = z + self.dropout_ending(self.attention_ending(z, pair_mask), ending, whole)
        return z + self.transition(z)

    def _switch(self, z: Pair, pair_mask: Float[Tensor, "B I J"]) -> tuple[Pair, Float[Tensor, "B I J"]]:
        mask = self.exchange.switch(pair_mask.unsqueeze(-1), "j", "i").squeeze(-1)
        return self.exchange.switch(z, "j", "i"), mask


class EvoformerBlock(ShardedModule):
    """One block of the Evoformer (algorithm 6) or, with `extra`, of the extra-MSA stack (algorithm 18)."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        super().__init__()
        heads, width = config.msa_heads, config.msa_head_width
        self.extra = extra
        self.row_attention = MSARowAttention(c_m, c_z, heads, width)
        self.column_attention = (MSAColumnGlobalAttention if extra else MSAColumnAttention)(c_m, heads, width)
        self.msa_transition = Transition(c_m, config.transition_factor)
        self.outer_product_mean = OuterProductMean(c_m, c_z, config.outer_product_channels)
        self.pair_stack = PairStack(c_z, config)
        self.dropout_row = Dropout(config.msa_dropout, shared="seq", sharded="seq")

    def forward(
        self,
        m: MSA,
        z: Pair,
        msa_mask: Float[Tensor, "B S R"],
        pair_mask: Float[Tensor, "B I J"],
        draws: Sequence[Draws] = (),
    ) -> tuple[MSA, Pair]:
        """m on S, z on J, in and out. `draws`: one stream of dropout per sample; none means no dropout."""
        whole = (m.shape[1], m.shape[2])
        m = m + self.dropout_row(self.row_attention(m, z, msa_mask), [d.at("row") for d in draws], whole)
        if self.extra:  # global attention needs only sums over sequences: m stays on S
            m = m + self.column_attention(m, msa_mask)
            m = m + self.msa_transition(m)
            m_res, mask_res = self._to_residues(m, msa_mask)
        else:
            m, mask_res = self._to_residues(m, msa_mask)
            m = m + self.column_attention(m, mask_res)
            m_res = m = m + self.msa_transition(m)
        z = z + self.outer_product_mean(m_res, mask_res)
        if not self.extra:
            m = self.exchange.switch(m, "res", "seq")
        return m, self.pair_stack(z, pair_mask, draws)

    def _to_residues(self, m: MSA, msa_mask: Float[Tensor, "B S R"]) -> tuple[MSA, Float[Tensor, "B S R"]]:
        mask = self.exchange.switch(msa_mask.unsqueeze(-1), "seq", "res").squeeze(-1)
        return self.exchange.switch(m, "seq", "res"), mask


class EvoformerStack(nn.Module):
    """Blocks one after another, each recomputed in the backward pass where the config says so."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.blocks = nn.ModuleList(EvoformerBlock(c_m, c_z, config, extra) for _ in range(config.blocks))

    def forward(
        self,
        m: MSA,
        z: Pair,
        msa_mask: Float[Tensor, "B S R"],
        pair_mask: Float[Tensor, "B I J"],
        draws: Sequence[Draws] = (),
    ) -> tuple[MSA, Pair]:
        recompute = self.checkpoint and z.requires_grad
        for number, block in enumerate(self.blocks):
            own = [d.at("block", number) for d in draws]
            if recompute:
                m, z = checkpoint(block, m, z, msa_mask, pair_mask, own, use_reentrant=False)
            else:
                m, z = block(m, z, msa_mask, pair_mask, own)
        return m, z
