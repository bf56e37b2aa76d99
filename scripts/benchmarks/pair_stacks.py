"""Pair stacks alone, under each way of communicating that the benchmarks compare: DSP, DAP, Fold-CP's one-dimensional mode.

The pair stack is what the Evoformer and Boltz-2, Fold-CP's model, have in common: the same five sub-layers of the same widths.
Their MSA halves differ: Boltz-2 has neither row nor column attention but pair-weighted averaging, and Fold-CP shards its MSA
along residues only (`src/boltz/distributed/model/modules/msa_1d.py`). So whole blocks are compared for DSP and DAP, and pair
stacks for all.

Shape legend: B batch, R residues, n1 n2 the axes of the pair representation, one of them this rank's shard, c channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from evodsp.config import EvoformerConfig
from evodsp.model.dropout import NO_DROPOUT, DropoutKeys, Streams, block_streams, draw_blocks
from evodsp.model.evoformer import PairMask, PairStack
from evodsp.model.primitives import Computed, use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.parallel.collectives import Axis
from evodsp.parallel.exchange import Exchange
from evodsp.rng import Draws

from .fold_cp import Ending, FoldCPPairStack

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Method:
    """A way of communicating in the pair stack."""

    name: str
    plan: CommunicationPlan | None = None
    """The communication plan; None: Fold-CP's one-dimensional mode."""
    ending: Ending = "z"
    """Fold-CP: what attention around the ending node sends to columns."""

    @property
    def axis(self) -> Axis:
        """Axis along which the pair representation is sharded between blocks."""
        return "j" if self.plan else "i"

    def stack(self, blocks: int, c_z: int, config: EvoformerConfig, exchange: Exchange) -> PairStacks:
        """Pair stacks of `blocks` blocks, recomputed in the backward pass if `config` says so."""
        layers: list[PairStack] = [
            PairStack(c_z, config) if self.plan else FoldCPPairStack(c_z, config, self.ending) for _ in range(blocks)
        ]
        # Fold-CP's checkpointing communicates everything again.
        keeps = self.plan is not None and self.plan.keep_gathered
        stacks = PairStacks(layers, config.checkpoint is True, exchange.keeping if keeps else noop_context_fn)
        use_exchange(stacks, exchange, self.plan)
        return stacks


DSP = Method("DSP", CommunicationPlan())
DSP_REGATHERING = Method("DSP regathers", CommunicationPlan(keep_gathered=False))
FASTFOLD = Method("DAP", DAP)
DAP_REGATHERING = Method("DAP regathers", replace(DAP, keep_gathered=False))
FOLD_CP = Method("Fold-CP 1d")
FOLD_CP_PROJECTIONS = Method("Fold-CP 1d, q k v", ending="qkv")


class PairStacks(Computed):
    """The pair stacks of consecutive blocks, without their MSA halves."""

    def __init__(self, blocks: Sequence[PairStack], recompute: bool, contexts: Contexts) -> None:
        """`recompute`: compute each block again in the backward pass, within `contexts`."""
        super().__init__()
        self.blocks: Sequence[PairStack] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.recompute, self.contexts = recompute, contexts

    def dropout_streams(self, draws: Sequence[Draws]) -> Streams:
        """The streams of dropout. `draws`: one stream per sample."""
        return block_streams(self.blocks, draws)

    def forward(
        self, z: Float[Tensor, "B n1 n2 c"], pair_mask: PairMask, keys: DropoutKeys = NO_DROPOUT
    ) -> Float[Tensor, "B n1 n2 c"]:
        """z on the method's axis in and out. `keys`: of `dropout_streams`."""
        for block, masks in zip(
            self.blocks, draw_blocks(self.blocks, keys, pair_mask.shape[1], self.kernels), strict=True
        ):
            arguments = (z, pair_mask, masks)
            if self.recompute:
                z = checkpoint(block, *arguments, use_reentrant=False, context_fn=self.contexts)
            else:
                z = block(*arguments)
        return z
