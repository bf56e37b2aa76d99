"""The ledger separates three phases: forward, backward, and the recomputation of activation checkpointing.

`tests/planner/test_traffic.py` compares the ledger of a recomputed stack with the schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evodsp.parallel.collectives import Sum, maximum
from evodsp.parallel.exchange import start
from evodsp.parallel.group import Group, Ledger
from tests.ranks import RankPool


def two_steps(handle: Any) -> tuple[list[tuple[str, str, int]], dict[str, int]]:
    """Two forward and backward passes through a recomputed sum and maximum: all entries, and the bytes of each phase."""
    ledger = Ledger()
    group = Group(handle, ledger)

    def function(x: Tensor) -> Tensor:
        return (maximum(x, group) + start(x[:1], Sum(group)).wait()).square()

    for length in (2, 3):
        x = torch.ones(length, requires_grad=True)
        checkpoint(function, x, use_reentrant=False).sum().backward()
    volumes = {phase: ledger.bytes(phase) for phase in ("forward", "recompute", "backward")}
    return [(e.phase, e.kind, e.elements) for e in ledger.entries], {**volumes, "all": ledger.bytes()}


def test_every_step_has_its_own_forward_recomputation_and_backward(pool: RankPool) -> None:
    """Catches recomputed collectives counted as forward, and a recompute flag that stays set in the next step."""
    for entries, volumes in pool.run(2, two_steps):
        step = {n: [("all-reduce", 2 * n), ("all-reduce", 2)] for n in (2, 3)}
        assert entries == [
            (phase, *call)
            for n in (2, 3)
            for phase, calls in (("forward", step[n]), ("recompute", step[n]), ("backward", step[n][1:]))
            for call in calls
        ]
        assert volumes == {"forward": 56, "recompute": 56, "backward": 16, "all": 128}
