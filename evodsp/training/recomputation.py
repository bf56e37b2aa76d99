"""`checkpoint: auto`: finds out in the first steps how many blocks of each stack may keep their activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule

from evodsp.model.evoformer import EvoformerStack
from evodsp.model.recomputation import Recomputation
from evodsp.model.templates import TemplatePairStack
from evodsp.printing import show

_SHARE = 0.9
"""Of the memory that a rank can have; the rest is for fragments, and for batches that need a little more."""
_STEPS = 2
"""Optimizer steps before the decision. The first one allocates Adam's state, so the second one's peak is that of every step."""


@dataclass(frozen=True)
class Measured:
    """What one rank has found."""

    room: float
    """Bytes that are left at the peak of a step in which each stack keeps one block."""
    bytes_of_blocks: tuple[int, ...]
    """What a block of each stack keeps."""


def kept_blocks(ranks: Sequence[Measured], blocks: Sequence[int]) -> list[int]:
    """How many blocks of each stack may be kept on every rank, from what all ranks measured with one block kept.

    `blocks`: the blocks of each stack. Earlier stacks get memory first. Without room not even the one block is kept.
    """
    room = min(rank.room for rank in ranks)
    kept = []
    for stack, number in enumerate(blocks):
        each = max(rank.bytes_of_blocks[stack] for rank in ranks)
        more = math.floor(room / each) if each else 0
        kept.append(max(0, min(number, 1 + more)))
        room -= (kept[-1] - 1) * each
    return kept


class AutomaticRecomputation(Callback):
    """Sets the number of recomputed blocks once. All ranks measure, and take the number that fits on each of them."""

    def __init__(self) -> None:
        self._undecided: list[Recomputation] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._undecided = self._stacks(pl_module)
        if pl_module.device.type != "cuda":
            for stack in self._undecided:
                stack.keep(0)
            self._undecided = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: object) -> None:
        stacks = self._undecided
        if not stacks or trainer.global_step < _STEPS:
            return
        self._undecided = []
        free, _total = torch.cuda.mem_get_info(pl_module.device)
        possible = free + torch.cuda.memory_reserved(pl_module.device)
        peak = torch.cuda.max_memory_allocated(pl_module.device)
        own = Measured(_SHARE * possible - peak, tuple(stack.bytes_of_block for stack in stacks))
        ranks = [own]
        if dist.is_initialized():
            ranks = [own] * dist.get_world_size()
            dist.all_gather_object(ranks, own)
        kept = kept_blocks(ranks, [stack.blocks for stack in stacks])
        for stack, number in zip(stacks, kept, strict=True):
            stack.keep(number)
        if trainer.is_global_zero:
            numbers = ", ".join(f"{number} of {stack.blocks}" for stack, number in zip(stacks, kept, strict=True))
            show(f"checkpoint auto: blocks that keep their activations: {numbers}")

    @staticmethod
    def _stacks(module: LightningModule) -> list[Recomputation]:
        """Those that are not decided yet, the one with most blocks first."""
        found = [
            stack.recomputation for stack in module.modules() if isinstance(stack, EvoformerStack | TemplatePairStack)
        ]
        return sorted((stack for stack in found if stack.auto), key=lambda stack: -stack.blocks)
