"""The memory that `reproduce.py` counts: against numbers made by hand, and against real ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evodsp.errors import UserError
from scripts.paper import memory
from scripts.paper.counting import CLAIMS
from scripts.paper.one_rank import Passes, passes
from scripts.paper.workload import Workload
from tests.ranks import RankPool

pytestmark = pytest.mark.verify

SMALL = Workload("tiny", time=8, rows=2, columns=4)  # 64 tokens, C = 32, 4 heads


def test_one_layer_keeps_what_is_counted_by_hand() -> None:
    """Catches activations that are missed or counted twice, and a shard that is not 1/N."""
    ranks = 4
    two, three = (passes("dsp", dataclasses.replace(SMALL, layers=layers), ranks) for layers in (2, 3))
    tokens, width, heads = 64 // ranks, 32, 4
    # A block keeps in bf16, in units of the width: inputs of two norms, of the first and second linear layer of attention
    # (1 + 1) and MLP (1 + 4), of GELU (4), and q, k, v; in fp32 mean and deviation of two norms, and a number per head.
    block = 2 * (2 + 2 + 5 + 4 + 3) * width + 4 * (4 + heads)
    assert three.saved - two.saved == 2 * tokens * block


def measured(group: Any) -> list[Any]:
    """Rows of a rank of the test's pool."""
    groups = {dist.get_world_size(group): group}
    workloads = [dataclasses.replace(SMALL, checkpoint=checkpoint) for checkpoint in (False, True)]
    return memory.measured_on_rank(groups, lambda text: None, workloads, list(groups))


def test_real_ranks_hold_what_is_counted_without_them(pool: RankPool) -> None:
    """Catches a count of tensors that the real program never makes, or that misses some."""
    rows = pool.run(2, measured)[0]
    assert len(rows) == 2 * len(CLAIMS)
    for row in rows[:4]:
        workload = dataclasses.replace(SMALL, checkpoint=bool(row["recomputed"]))
        counted = passes(row["method"], workload, 2, torch.float32)
        row |= {"counted_saved_bytes": counted.saved, "counted_peak_bytes": counted.peak}
    assert memory.wrong({"memory_measured": rows[:4]}) == []
    rows[0]["measured_saved_bytes"] += 2 * rows[0]["m_bytes"]
    assert len(memory.wrong({"memory_measured": rows[:4]})) == 1


def test_the_smallest_group_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a group that does not fit, one that is larger than needed, and a method that cannot have enough ranks."""

    def held(method: str, workload: Workload, ranks: int) -> Passes:
        if ranks > 4 and method != "dsp":
            raise UserError("4 heads")
        return Passes([], [], 0, 0, saved=0, peak=1000 // ranks, parameters=0)

    monkeypatch.setattr(memory, "held", held)
    monkeypatch.setattr(memory, "CAPACITY", 200)
    settings = {"smallest": {"models": ["720m"], "times": [512]}}
    rows = {row["method"]: row for row in memory.smallest_rows(settings, lambda text: None)}
    dsp = rows["dsp"]
    assert (dsp["ranks"], dsp["bytes"], dsp["too_few_bytes"], dsp["paper_ranks"]) == (8, 125, 250, 8)
    assert rows["ulysses"]["ranks"] == "x: 4 heads"


def test_zero_spreads_gradients_and_states_only() -> None:
    """Catches weights that are counted as spread, and ZeRO for a method that the paper runs without it."""
    assert memory.states("dsp", 1280, 128) == 1280 * 2 + 1280 * 14 // 128
    assert memory.states("megatron_sp", 1280, 128) == 1280 * 16
