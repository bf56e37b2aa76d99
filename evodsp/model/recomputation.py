"""Chooses which blocks of a stack are recomputed in the backward pass instead of keeping their activations.

The first blocks are recomputed, the last ones are kept. The backward pass reaches the last ones first and frees what they
kept before it recomputes the first ones, so the two never add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from evodsp.parallel.dtensor import is_dtensor

Setting = bool | int | Literal["auto"]
"""`checkpoint` of a stack's config: recompute all blocks, none, a number of blocks, or as many as the memory requires."""


class Recomputation:
    """The number of blocks of a stack that are recomputed. It must be the same on all ranks that share a sample, because a
    recomputed block communicates again.

    With `auto`, all blocks but the last are recomputed at first. The bytes of the last one are counted, and `keep` then fixes
    the number.
    """

    def __init__(self, setting: Setting, blocks: int) -> None:
        self.blocks = blocks
        self.auto = setting == "auto"
        """Whether the number is still to be found."""
        self.bytes_of_block = 0
        """Bytes that a block keeps for its backward pass on this rank, as far as counted."""
        self.number = blocks - 1 if setting == "auto" else blocks if setting is True else min(int(setting), blocks)
        self.number = max(0, self.number)
        """Number of blocks that are recomputed."""

    def keep(self, blocks: int) -> None:
        """Keep the activations of the last `blocks` blocks."""
        self.number, self.auto = self.blocks - min(max(blocks, 0), self.blocks), False

    @property
    def settled(self) -> int | None:
        """The number of recomputed blocks if it is final, otherwise None. It is 0 without gradients, when nothing is
        recomputed.
        """
        if not torch.is_grad_enabled():
            return 0
        return None if self.auto else self.number

    def covers(self, segment: int) -> bool:
        """Whether a segment is recomputed. Segment k is block k; or it is the latter part of block k - 1 and the former part
        of block k, and then there is one segment more than there are blocks.
        """
        return segment < self.number or self.number == self.blocks

    @contextmanager
    def counting(self, segment: int, stack: nn.Module) -> Iterator[None]:
        """With `auto`, count the bytes that `segment` keeps, if it is the last whole block of `stack`. Weights are not
        counted.
        """
        if not self.auto or segment != self.blocks - 1 or not torch.is_grad_enabled():
            yield
            return
        # A copy in half precision hides its parameter (`evodsp.model.casts`); `getattr` finds what the layers read.
        weights = {
            weight.untyped_storage().data_ptr()
            for module in stack.modules()
            for name in module._parameters
            if (weight := getattr(module, name)) is not None and not is_dtensor(weight)
        }
        seen: dict[int, int] = {}

        def count(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return x

        with saved_tensors_hooks(count, _unchanged):
            yield
        self.bytes_of_block = max(self.bytes_of_block, sum(seen.values()))


def _unchanged(x: Tensor) -> Tensor:
    return x
