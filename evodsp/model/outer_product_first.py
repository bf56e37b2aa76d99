"""Evoformer and extra-MSA stack of AlphaFold-Multimer, whose blocks begin with the outer product mean.

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c_m c_z channels. A small letter (s r j) is this
rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.

Once a block has computed the outer product mean, its MSA sub-layers and its pair sub-layers do not depend on each other. So
they alternate, and what one of the two communicates travels while the other one computes. Forward volume of one rank among N,
with Mm = S R c_m and Mz = R R c_z:

    sub-layer                              m, z on     communication
    outer product mean                     R, J        all-gather of one 32-channel operand, 32 S R
    switch m to S, bias of row attention               all-to-all, Mm/N; all-gather, 8 R R; hidden by the multiplications
    triangle multiplications               J           as in `evodsp.model.evoformer`
    MSA row attention with pair bias       S           hides the switch of z to I
    switch m to R                                      all-to-all, Mm/N, hidden by the attentions
    triangle attentions, pair transition   I, J        as in `evodsp.model.evoformer`
    MSA column attention, MSA transition   R           none

In the extra-MSA stack m stays on S.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from evodsp.config import EvoformerConfig
from evodsp.model.dropout import NO_DROPOUT, NO_MASKS, Dropout, DropoutKeys, Masks
from evodsp.model.evoformer import MSALayers, MSAMask, PairMask, PairStack
from evodsp.model.primitives import Budgeted
from evodsp.model.stack import BlocksInTurn
from evodsp.parallel.collectives import Axis


class OuterProductFirstBlock(Budgeted):
    """One block. Its parameters have the names of those of `EvoformerBlock`.

    `updates_msa`: False in the last block of the extra-MSA stack, whose m nobody reads. The parameters of its MSA sub-layers
    exist in the published files, but are not used.
    """

    gathers_parameters = True

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool, updates_msa: bool) -> None:
        super().__init__()
        self.extra, self.updates_msa = extra, updates_msa
        self.msa_stack = MSALayers(c_m, c_z, config, extra)
        self.pair_stack = PairStack(c_z, config)
        self.pair_stack.gathers_parameters = False  # the block gathers all of them

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return *self.msa_stack.dropouts, *self.pair_stack.dropouts

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        return (self,)

    def forward(
        self,
        m: Float[Tensor, "B _ _ c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Masks = NO_MASKS,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes and returns m on `column_axis` and z on J. `masks`: dropout masks of this block."""
        msa, pair = self.sharded(m, self.msa_stack.column_axis, msa_mask), self.sharded(z, "j", pair_mask)
        pair += self.msa_stack.outer_product_mean(msa)
        if not self.updates_msa:
            return m, self.pair_stack.attentions(self.pair_stack.multiplications(pair, masks), masks).x
        msa = msa.switch("seq")
        bias = self.msa_stack.row_attention.bias(pair)
        pair = self.pair_stack.multiplications(pair, masks)
        msa = self.msa_stack.rows(msa, bias, masks)
        pair = self.pair_stack.attentions(pair, masks)
        return self.msa_stack.columns(msa).x, pair.x


class OuterProductFirstStack(BlocksInTurn):
    """A sequence of these blocks. `config.checkpoint` and `config.checkpoint_projections` say what is recomputed."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        last = config.blocks - 1
        blocks = [
            OuterProductFirstBlock(c_m, c_z, config, extra, updates_msa=not extra or number < last)
            for number in range(config.blocks)
        ]
        super().__init__(blocks, config.checkpoint, config.checkpoint_projections)
        self.extra = extra

    @property
    def result_axis(self) -> Axis:
        """Axis along which m is sharded in the result."""
        return self.plan.extra_msa_axis if self.extra else "res"

    def forward(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        keys: DropoutKeys = NO_DROPOUT,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes m on S and z on J; returns m on `result_axis` and z on J. The m of an extra-MSA stack is that of the last
        block but one. `keys`: keys of `dropout_streams`.
        """
        if self.result_axis != "seq":
            m = self.exchange.switch(m, "seq", self.result_axis, whole=msa_mask.shape[1])
        return super().forward(m, z, msa_mask, pair_mask, keys)
