"""The ledger of communication: every collective in order, with its bytes.

An all-gather counts the bytes of its output; a reduce-scatter and an all-to-all those of their local input; an all-reduce
twice its input; a broadcast and a reduce one copy of what is sent. An all-gather or a reduce-scatter counts the same whether it
is done at once or one shard at a time. A ring of sends and receives, in which the shards of a tensor pass every rank, is one
entry and counts as an all-gather of them. The part that a rank sends to itself is included: (N - 1) / N of the count crosses
the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Kind = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce", "send-receive"]
Phase = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True)
class Entry:
    """One collective that one rank took part in."""

    kind: Kind
    elements: int
    bytes: int
    phase: Phase
    """`backward`: a transpose, launched for gradients. `recompute`: a collective of the forward pass that activation
    checkpointing launches again inside the backward pass."""


@dataclass
class Ledger:
    """The collectives of one rank since the ledger was made."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, kind: Kind, elements: int, element_size: int, transposed: bool = False) -> None:
        """Record a collective that moves `elements` numbers of `element_size` bytes. `transposed`: whether it carries
        gradients.
        """
        phase: Phase = "backward" if transposed else "recompute" if _inside_backward_pass() else "forward"
        self.entries.append(Entry(kind, elements, elements * element_size, phase))

    def of(self, phase: Phase) -> list[Entry]:
        """The entries of one phase, in order."""
        return [entry for entry in self.entries if entry.phase == phase]

    def bytes(self, phase: Phase | None = None) -> int:
        """Bytes of all entries, or of one phase."""
        return sum(entry.bytes for entry in self.entries if phase is None or entry.phase == phase)


def _inside_backward_pass() -> bool:
    """Whether autograd is running a backward pass in this thread. A forward collective that is launched there belongs to a
    recomputation: activation checkpointing recomputes inside the backward pass without notice. torch has no public function
    for this; its own checkpointing calls the same private one."""
    return torch._C._current_graph_task_id() != -1
