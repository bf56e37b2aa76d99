"""Chooses what the blocks of a stack compute again in the backward pass instead of keeping it.

The first blocks keep nothing and are recomputed whole. The next ones keep all but the projections of attention (queries, keys,
values and gates): half of the bytes of a block, for a layer norm and a matrix product each. The last ones keep everything. The
backward pass reaches the last ones first and frees what they kept before it recomputes the first ones, so the two never add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from evodsp.model.precision import autocast_of_now
from evodsp.parallel.dtensor import is_dtensor

Setting = bool | int | Literal["auto"]
"""`checkpoint` of a stack's config: recompute all blocks, none, a number of blocks, or as many as the memory requires."""

_AXES_OF_PROJECTIONS = 6
"""Attention keeps queries, keys, values and gates as one tensor [B N L 4 H D]. Nothing else that a block keeps has six axes."""


class Recomputed(NamedTuple):
    """Recomputed part of a stack: what the backward pass computes again."""

    blocks: int
    """Number of blocks, the first ones, that are recomputed whole."""
    projections: int = 0
    """Number of blocks after them that compute the projections of attention again and keep the rest."""

    @classmethod
    def of(cls, blocks: int, checkpoint: bool | int, projections: bool | int) -> Recomputed:
        """The numbers for a stack of `blocks` blocks. `checkpoint`, `projections`: a number of blocks, True for all, of the
        second one all that are left.
        """
        whole = blocks if checkpoint is True else min(int(checkpoint), blocks)
        return cls(whole, blocks - whole if projections is True else min(int(projections), blocks - whole))


class Recomputation:
    """Blocks that a stack recomputes: the same on all ranks that share a sample, because a recomputed block communicates again.

    With `auto`, all blocks but the last are recomputed at first. The bytes of the last one are counted, and `settle` then fixes
    the numbers.
    """

    def __init__(self, setting: Setting, projections: bool | int, blocks: int) -> None:
        """`setting`, `projections`: `checkpoint` and `checkpoint_projections` of the stack's config."""
        self.blocks = blocks
        self.auto = setting == "auto"
        """Whether the numbers are still to be found."""
        self.bytes_of_block = self.bytes_of_projections = 0
        """Bytes that a block keeps for its backward pass on this rank, and those of its projections, as far as counted."""
        first = Recomputed(max(0, blocks - 1)) if setting == "auto" else Recomputed.of(blocks, setting, projections)
        self.chosen = first

    def settle(self, chosen: Recomputed) -> None:
        """Fix the numbers."""
        self.chosen, self.auto = chosen, False

    @property
    def settled(self) -> Recomputed | None:
        """The numbers if they are final, otherwise None. They are 0 without gradients, when nothing is recomputed."""
        if not torch.is_grad_enabled():
            return Recomputed(0)
        return None if self.auto else self.chosen

    def covers(self, segment: int) -> bool:
        """Whether a segment is recomputed whole. Segment k is block k; or it is the latter part of block k - 1 and the former
        part of block k, and then there is one segment more than there are blocks.
        """
        return segment < self.chosen.blocks or self.chosen.blocks == self.blocks

    def covers_projections(self, segment: int) -> bool:
        """Whether a segment computes the projections of attention again and keeps the rest."""
        either = sum(self.chosen)
        return not self.covers(segment) and (segment < either or either == self.blocks)

    @contextmanager
    def counting(self, segment: int, stack: nn.Module) -> Iterator[None]:
        """With `auto`, count the bytes that `segment` keeps, if it is the last whole block of `stack`. Weights are not
        counted.
        """
        if not self.auto or segment != self.blocks - 1 or not torch.is_grad_enabled():
            yield
            return
        # A copy in half precision hides its parameter (`evodsp.model.precision`); `getattr` finds what the layers read.
        weights = {
            weight.untyped_storage().data_ptr()
            for module in stack.modules()
            for name in module._parameters
            if (weight := getattr(module, name)) is not None and not is_dtensor(weight)
        }
        seen: dict[int, int] = {}
        projections: dict[int, int] = {}

        def count(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
                if x.ndim == _AXES_OF_PROJECTIONS:
                    projections[storage.data_ptr()] = storage.nbytes()
            return x

        with saved_tensors_hooks(count, _unchanged):
            yield
        self.bytes_of_block = max(self.bytes_of_block, sum(seen.values()))
        self.bytes_of_projections = max(self.bytes_of_projections, sum(projections.values()))


def computed_again(function: Callable[..., Tensor], make: Callable[[], Tensor], made: Tensor, *others: Any) -> Tensor:
    """function(made, *others), whose backward pass computes `made` again: what would be kept of `made`, or of a view of it,
    is taken from the result of `make`, which has the same numbers and strides.
    """
    if torch.compiler.is_compiling():  # a graph has no hooks, but knows what to compute again
        return function(checkpoint(make, use_reentrant=False, preserve_rng_state=False), *others)
    storage, autocast = made.untyped_storage()._cdata, autocast_of_now(made.device)

    def pack(x: Tensor) -> Any:
        if x.untyped_storage()._cdata != storage:
            return x
        return x.shape, x.stride(), x.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad(), autocast():
            return make().as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        return function(made, *others)


def _unchanged(x: Tensor) -> Tensor:
    return x
