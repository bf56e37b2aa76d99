"""Evoformer stack and extra-MSA stack (algorithms 6 and 18).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c_m c_z channels. A small letter (s r i j) is this
rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.

m is the MSA representation [B, S, R, c_m], z the pair representation [B, I, J, c_z]. A block receives m sharded along S and
z along J. In the Evoformer it leaves m on R, and the stack sends it back to S while the pair stack computes. Forward volume
of one rank among N, with Mm = S R c_m and Mz = R R c_z:

    sub-layer                              m, z on     communication
    MSA row attention with pair bias       S, J        all-gather of the bias, 8 R R
    switch m to R                                      all-to-all, Mm/N
    MSA column attention, MSA transition   R           none
    outer product mean                     R, J        all-gather of one 32-channel operand, 32 S R
    switch m to S                                      all-to-all, Mm/N, hidden by the pair stack
    triangle multiplication, outgoing      J           all-to-all of both operands to channels and of the product back, 3 Mz/N
    switch z to I                                      all-to-all, Mz/N, hidden by the next sub-layer
    triangle multiplication, incoming      J           the same, 3 Mz/N; the product returns on I
    triangle attention, starting node      I           all-gather of the bias, 4 R R
    switch z to J                                      all-to-all, Mz/N
    triangle attention, ending node        J           all-gather of the bias, 4 R R
    pair transition                        J           none

Some parts of a stack are recomputed in the backward pass, and its calls may be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from evodsp.config import EvoformerConfig, TemplateConfig
from evodsp.model.dropout import (
    NO_DROPOUT,
    NO_MASKS,
    BlockWithDropout,
    Dropout,
    DropoutKeys,
    Masks,
    Streams,
    block_streams,
    draw_blocks,
)
from evodsp.model.graphs import Recorded
from evodsp.model.msa_ops import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from evodsp.model.pair_ops import TriangleAttention, TriangleMultiplication
from evodsp.model.primitives import Budgeted, PairBias, Transition
from evodsp.model.recomputation import Recomputation, Recomputed, Setting
from evodsp.model.sharded import Sharded
from evodsp.parallel.collectives import Axis
from evodsp.parallel.exchange import Pending, Ready
from evodsp.rng import Draws


@runtime_checkable
class Block(BlockWithDropout, Protocol):
    """A block of a stack."""

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        """The modules that the stack calls, in order. Each is compiled as one graph; part k of block n is in segment n + k."""


class Stack(Recorded):
    """A sequence of blocks. Its `forward` runs segments: segment k is block k; or it is the last part of block k - 1 and the
    first part of block k, and then there is one segment more than there are blocks.
    """

    def __init__(self, blocks: Sequence[Block], recomputed: Setting, projections: bool | int = False) -> None:
        """`recomputed`, `projections`: `checkpoint` and `checkpoint_projections` of the stack's config."""
        super().__init__()
        self.recomputation = Recomputation(recomputed, projections, len(blocks))
        self.blocks: Sequence[Any] = nn.ModuleList(blocks)  # type: ignore[arg-type, assignment]
        self._tell_parts()

    def recompute(self, chosen: Recomputed) -> None:
        """Fix what is recomputed, where `checkpoint` is auto."""
        self.recomputation.settle(chosen)
        self._tell_parts()

    def _tell_parts(self) -> None:
        for number, block in enumerate(self.blocks):
            for segment, part in enumerate(block.parts, start=number):
                part.projects_again = self.recomputation.covers_projections(segment)

    def settings(self) -> Hashable | None:
        chosen = self.recomputation.settled
        memory = [block.parts[0].memory for block in self.blocks[:1]]
        return None if chosen is None else (super().settings(), chosen, *memory)

    def dropout_streams(self, draws: Sequence[Draws]) -> Streams:
        """The dropout streams of the stack. `draws`: this stack's stream for each entry of the batch."""
        return block_streams(self.blocks, draws)

    def run(
        self,
        number: int,
        recompute: bool,
        segment: Callable[..., Any],
        *arguments: Any,
        contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    ) -> Any:
        """The result of `segment(*arguments)`, which is segment `number`. `recompute`: whether it is computed again in the
        backward pass. `contexts`: makes the contexts of the first and of the second computation.
        """
        if not recompute:
            with self.recomputation.counting(number, self):
                return segment(*arguments)
        # Nothing here draws from torch's generators, and a CUDA graph could not save their states.
        return checkpoint(segment, *arguments, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


class BlocksInTurn(Stack):
    """A stack whose segments are its blocks. `block(x, z, mask, pair_mask, masks)` returns x and z; `masks` are those of its
    dropout.
    """

    sharded_inputs = (0, 1)

    def forward(
        self,
        x: Float[Tensor, "B _ _ c_x"],
        z: Float[Tensor, "B I j c_z"],
        mask: Float[Tensor, "B S R"],
        pair_mask: Float[Tensor, "B R R"],
        keys: DropoutKeys = NO_DROPOUT,
    ) -> tuple[Float[Tensor, "B _ _ c_x"], Float[Tensor, "B I j c_z"]]:
        """Takes and returns both representations, sharded as the blocks have them. `keys`: keys of `dropout_streams`."""
        masks = draw_blocks(self.blocks, keys, residues=mask.shape[2], kernels=self.kernels)
        contexts = self.exchange.keeping if self.plan.keep_gathered else noop_context_fn
        for number, (block, own) in enumerate(zip(self.blocks, masks, strict=True)):
            recompute = self.recomputation.covers(number) and torch.is_grad_enabled()
            x, z = self.run(number, recompute, block, x, z, mask, pair_mask, own, contexts=contexts)
        return x, z


MSAMask = Float[Tensor, "B S R"]
PairMask = Float[Tensor, "B R R"]


class MSALayers(Budgeted):
    """The MSA sub-layers of a block and its outer product mean.

    With `extra`, they are those of a block of the extra-MSA stack: column attention is global (algorithm 19), and m stays on S,
    because global attention needs only sums over sequences from the other ranks.
    """

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        super().__init__()
        self.extra = extra
        heads, width = config.msa_heads, config.msa_head_width
        self.row_attention = MSARowAttention(c_m, c_z, heads, width)
        self.row_dropout = Dropout(c_m, config.msa_dropout, "row_attention", shared_axis="seq")
        self.column_attention = (MSAColumnGlobalAttention if extra else MSAColumnAttention)(c_m, heads, width)
        self.transition = Transition(c_m, config.transition_factor)
        self.outer_product_mean = OuterProductMean(c_m, c_z, config.outer_product_channels)

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return (self.row_dropout,)

    @property
    def column_axis(self) -> Axis:
        """Axis along which m is sharded from column attention on."""
        return self.plan.extra_msa_axis if self.extra else "res"

    def rows(self, msa: Sharded, bias: PairBias, masks: Masks) -> Sharded:
        """Row attention (line 2). Takes m on S and returns it on its way to `column_axis`."""
        msa = msa.taken()
        msa += self.row_dropout(self.row_attention(msa, bias), masks)
        return msa.switch(self.column_axis)

    def columns(self, msa: Sharded) -> Sharded:
        """Column attention and the transition (lines 3 and 4). m is on `column_axis`."""
        msa = msa.taken()
        msa += self.column_attention(msa)
        msa += self.transition(msa)
        return msa


class MSAStack(MSALayers):
    """MSA stack and outer product mean of a block (algorithm 6, lines 2 to 5)."""

    gathers_parameters = True

    def forward(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Masks = NO_MASKS,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes m on S and z on J; returns m on `column_axis` and z on J. `masks`: dropout masks of this block."""
        msa, pair = self.sharded(m, "seq", msa_mask), self.sharded(z, "j", pair_mask)
        msa = self.columns(self.rows(msa, self.row_attention.bias(pair), masks))
        pair += self.outer_product_mean(msa)
        return msa.x, pair.x


class PairStack(Budgeted):
    """Pair stack of a block (algorithm 6, lines 6 to 10).

    `transition`: makes the last sub-layer, a module that returns the `Update` of a `Sharded` representation, from its channels
    and its widening factor.
    """

    gathers_parameters = True

    def __init__(
        self,
        c_z: int,
        config: EvoformerConfig | TemplateConfig,
        transition: Callable[[int, int], nn.Module] = Transition,
    ) -> None:
        super().__init__()
        channels, heads, width = config.triangle_channels, config.pair_heads, config.pair_head_width
        rate = config.pair_dropout
        self.triangle_outgoing = TriangleMultiplication(c_z, channels, "outgoing")
        self.outgoing_dropout = Dropout(c_z, rate, "triangle_outgoing", shared_axis="i")
        self.triangle_incoming = TriangleMultiplication(c_z, channels, "incoming")
        self.incoming_dropout = Dropout(c_z, rate, "triangle_incoming", shared_axis="i")
        self.attention_starting = TriangleAttention(c_z, heads, width, "starting")
        self.starting_dropout = Dropout(c_z, rate, "attention_starting", shared_axis="i")
        self.attention_ending = TriangleAttention(c_z, heads, width, "ending")
        self.ending_dropout = Dropout(c_z, rate, "attention_ending", shared_axis="j")
        self.transition = transition(c_z, config.transition_factor)

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return self.outgoing_dropout, self.incoming_dropout, self.starting_dropout, self.ending_dropout

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        return (self,)

    def forward(
        self, z: Float[Tensor, "B I j c_z"], pair_mask: PairMask, masks: Masks = NO_MASKS
    ) -> Float[Tensor, "B I j c_z"]:
        """Takes and returns z on J. `masks`: dropout masks of this block."""
        rows = self.multiplications(self.sharded(z, "j", pair_mask), masks)
        return self.attentions(rows, masks).x

    def multiplications(self, pair: Sharded, masks: Masks) -> Sharded:
        """Both triangle multiplications. Takes z on J and returns it on its way to I."""
        pair = pair.taken().switch(self.plan.outgoing_axis)
        pair += self.outgoing_dropout(self.triangle_outgoing(pair), masks)
        return self._incoming(pair.switch("j"), masks).switch("i")

    def attentions(self, pair: Sharded, masks: Masks) -> Sharded:
        """Both triangle attentions and the transition. Takes z on I and returns it on J."""
        pair = pair.taken()
        pair += self.starting_dropout(self.attention_starting(pair), masks)
        pair = pair.switch("j")
        pair += self.ending_dropout(self.attention_ending(pair), masks)
        pair += self.transition(pair)
        return pair

    def _incoming(self, pair: Sharded, masks: Masks) -> Sharded:
        """The incoming triangle multiplication, while z is sent to I. It is a method so that z on J is freed before
        attention.
        """
        rows = pair.switch(self.plan.incoming_result_axis)  # travels while the product is computed
        rows += self.incoming_dropout(self.triangle_incoming(pair, rows), masks)
        return rows


class EvoformerBlock(nn.Module):
    """One block of the Evoformer (algorithm 6) or, with `extra`, of the extra-MSA stack (algorithm 18)."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        super().__init__()
        self.msa_stack = MSAStack(c_m, c_z, config, extra)
        self.pair_stack = PairStack(c_z, config)

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return *self.msa_stack.dropouts, *self.pair_stack.dropouts

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        return self.msa_stack, self.pair_stack

    def forward(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Masks = NO_MASKS,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes m on S and z on J; returns m on R (with `extra` on S) and z on J. `masks`: dropout masks of this block."""
        m, z = self.msa_stack(m, z, msa_mask, pair_mask, masks)
        return m, self.pair_stack(z, pair_mask, masks)


class EvoformerStack(Stack):
    """A sequence of blocks. `config.checkpoint` and `config.checkpoint_projections` say what the backward pass recomputes.

    A recomputed segment is the pair stack of one block and the MSA stack of the next. Between the MSA stack and the pair
    stack of one block, outside of any segment, m is sent back to S. The all-to-all is awaited after the pair stack, which
    therefore hides it.
    """

    sharded_inputs = (0, 1)

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        blocks = [EvoformerBlock(c_m, c_z, config, extra) for _ in range(config.blocks)]
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
        """Takes m on S and z on J; returns m on R (in the extra-MSA stack on S) and z on J. `keys`: keys of
        `dropout_streams`.
        """
        masks = draw_blocks(self.blocks, keys, residues=msa_mask.shape[2], kernels=self.kernels)
        contexts = self.exchange.keeping if self.plan.keep_gathered else noop_context_fn
        arriving: Pending = Ready(m)
        for number in range(len(self.blocks) + 1):
            recompute = self.recomputation.covers(number) and torch.is_grad_enabled()
            arguments = (number, arriving, z, msa_mask, pair_mask, masks, recompute)
            m, z = self.run(number, recompute, self._segment, *arguments, contexts=contexts)
            arriving = Ready(m)
            if number + 1 < len(self.blocks) and (axis := self.blocks[number].msa_stack.column_axis) != "seq":
                arriving = self.exchange.start_switch(m, axis, "seq", whole=msa_mask.shape[2])
        if not self.blocks and not self.extra:  # the last one would have left m on R
            m = self.exchange.switch(m, "seq", "res", whole=msa_mask.shape[1])
        return m, z

    def _segment(
        self,
        number: int,
        arriving: Pending,
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Sequence[Masks],
        recompute: bool,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """The pair stack of the block before `number`, then the MSA stack of block `number`."""
        if number > 0:
            z = self.blocks[number - 1].pair_stack(z, pair_mask, masks[number - 1])
        m = arriving.wait(keep=recompute)
        if number < len(self.blocks):
            m, z = self.blocks[number].msa_stack(m, z, msa_mask, pair_mask, masks[number])
        return m, z
