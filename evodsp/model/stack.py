"""A stack of blocks: some of its parts are recomputed in the backward pass, and its calls may be recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from evodsp.model.dropout import BlockWithDropout, Streams, block_streams
from evodsp.model.graphs import Recorded
from evodsp.model.primitives import Budgeted, ShardedModule
from evodsp.model.recomputation import Recomputation, Setting
from evodsp.rng import Draws


@runtime_checkable
class Block(BlockWithDropout, Protocol):
    """A block of a stack."""

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        """The modules that the stack calls, in order. Each is compiled as one graph; part k of block n is in segment n + k."""


class Stack(Recorded, ShardedModule):
    """A sequence of blocks. Its `forward` runs segments: segment k is block k; or it is the last part of block k - 1 and the
    first part of block k, and then there is one segment more than there are blocks.
    """

    def __init__(self, blocks: Sequence[Block], recomputed: Setting) -> None:
        """`recomputed`: `checkpoint` of the stack's config."""
        super().__init__()
        self.recomputation = Recomputation(recomputed, len(blocks))
        self.blocks: Sequence[Any] = nn.ModuleList(blocks)  # type: ignore[arg-type, assignment]

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
