"""Evoformer and extra-MSA stacks (algorithms 6 and 18), run by the tables of `evodsp.model.schedule`.

Shape legend: B batch, S sequences, R residues, I J residues of the pair; small letters are this rank's shard of an axis.
Layout: m on S and z on J at entry; at the end the Evoformer leaves m on R, where its first row is, and z on J.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from evodsp.config import EvoformerConfig
from evodsp.model.block import Block, Sharded
from evodsp.model.msa_ops import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from evodsp.model.pair_ops import TriangleAttention, TriangleMultiplication
from evodsp.model.primitives import ShardedModule, Transition
from evodsp.model.schedule import EXTRA_MSA_HALF, MSA_HALF, PAIR_HALF
from evodsp.parallel.pending import Pending, Ready
from evodsp.rng import Draws

MSAMask = Float[Tensor, "B S R"]
PairMask = Float[Tensor, "B R R"]


class PairStack(Block):
    """The pair half of a block (algorithm 6, lines 6 to 10). z on J in and out."""

    def __init__(self, c_z: int, config: EvoformerConfig) -> None:
        super().__init__(PAIR_HALF, config.msa_dropout, config.pair_dropout)
        self.triangle_outgoing = TriangleMultiplication(c_z, config.triangle_channels, "outgoing")
        self.triangle_incoming = TriangleMultiplication(c_z, config.triangle_channels, "incoming", result="i")
        self.attention_starting = TriangleAttention(c_z, config.pair_heads, config.pair_head_width, "starting")
        self.attention_ending = TriangleAttention(c_z, config.pair_heads, config.pair_head_width, "ending")
        self.transition = Transition(c_z, config.transition_factor)

    def forward(
        self, z: Float[Tensor, "B I j c_z"], pair_mask: PairMask, draws: Sequence[Draws] = ()
    ) -> Float[Tensor, "B I j c_z"]:
        pair = Sharded(z, "j", pair_mask, self.exchange)
        self.run(draws, pair=pair)
        return pair.on("j")


class EvoformerBlock(Block):
    """One block of the Evoformer (algorithm 6) or, with `extra`, of the extra-MSA stack (algorithm 18)."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        super().__init__(EXTRA_MSA_HALF if extra else MSA_HALF, config.msa_dropout, config.pair_dropout)
        heads, width = config.msa_heads, config.msa_head_width
        self.row_attention = MSARowAttention(c_m, c_z, heads, width)
        self.column_attention = (MSAColumnGlobalAttention if extra else MSAColumnAttention)(c_m, heads, width)
        self.msa_transition = Transition(c_m, config.transition_factor)
        self.outer_product_mean = OuterProductMean(c_m, c_z, config.outer_product_channels, "seq" if extra else "res")
        self.pair_stack = PairStack(c_z, config)

    def msa_half(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        draws: Sequence[Draws] = (),
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Lines 2 to 5 of algorithm 6. m on S in; out on R, or with `extra` on S."""
        msa, pair = Sharded(m, "seq", msa_mask, self.exchange), Sharded(z, "j", pair_mask, self.exchange)
        self.run(draws, msa=msa, pair=pair)
        return msa.x, pair.x

    def forward(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        draws: Sequence[Draws] = (),
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """A block by itself. `draws`: one stream of dropout per sample; none means no dropout."""
        m, z = self.msa_half(m, z, msa_mask, pair_mask, draws)
        return m, self.pair_stack(z, pair_mask, draws)


class EvoformerStack(ShardedModule):
    """Blocks one after another, recomputed in the backward pass where the config says so.

    What is recomputed at once is a pair half and the MSA half that follows it. Between MSA half and pair half, outside of
    any recomputation, the MSA representation is sent back to S; it is awaited when the pair half has been computed.
    """

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        super().__init__()
        self.checkpoint, self.extra = config.checkpoint, extra
        blocks = [EvoformerBlock(c_m, c_z, config, extra) for _ in range(config.blocks)]
        self.blocks: Sequence[EvoformerBlock] = nn.ModuleList(blocks)  # type: ignore[assignment]

    def forward(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        draws: Sequence[Draws] = (),
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """m on S and z on J in; z on J and m on R out, or with `extra` on S."""
        recompute = self.checkpoint and torch.is_grad_enabled()
        arriving: Pending = Ready(m)
        for number in range(len(self.blocks) + 1):
            arguments = (number, arriving, z, msa_mask, pair_mask, draws, recompute)
            if recompute:
                contexts = self.exchange.keeping if self.plan.keep_gathered else noop_context_fn
                m, z = checkpoint(self._segment, *arguments, use_reentrant=False, context_fn=contexts)
            else:
                m, z = self._segment(*arguments)
            if self.extra or number + 1 >= len(self.blocks):
                arriving = Ready(m)
            else:
                arriving = self.exchange.start_switch(m, "res", "seq", whole=msa_mask.shape[2])
        return m, z

    def _segment(
        self,
        number: int,
        arriving: Pending,
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        draws: Sequence[Draws],
        recompute: bool,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """The pair half of the block before `number`, then the MSA half of block `number`."""
        if number > 0:
            z = self.blocks[number - 1].pair_stack(z, pair_mask, [d.at("block", number - 1) for d in draws])
        m = arriving.wait(keep=recompute)
        if number < len(self.blocks):
            own = [d.at("block", number) for d in draws]
            m, z = self.blocks[number].msa_half(m, z, msa_mask, pair_mask, own)
        return m, z
