"""A stack of blocks: some of its parts are recomputed in the backward pass, and its calls may be recorded.

Shape legend: B batch, S rows of a first representation, R residues, I J residues of the pair, c_x c_z channels. A small letter
(j) is this rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from evodsp.model.dropout import NO_DROPOUT, BlockWithDropout, DropoutKeys, Streams, block_streams, draw_blocks
from evodsp.model.graphs import Recorded
from evodsp.model.primitives import Budgeted
from evodsp.model.recomputation import Recomputation, Recomputed, Setting
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
