"""The volumes that `reproduce.py` counts, and its comparison with the paper's tables."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from evodsp.parallel.group import _all_gather, _reduce_scatter
from scripts.benchmarks.fake_ranks import fake_group
from scripts.paper import counting
from scripts.paper.one_rank import SentBytes
from scripts.paper.workload import Workload

pytestmark = pytest.mark.verify

SMALL = Workload("tiny", time=8, rows=2, columns=4)
RANKS = 4


@pytest.mark.parametrize(
    "method",
    [
        "dsp",
        "ring",
        "ulysses",
        "megatron_sp",
        "megatron_tp",
    ],
)
def test_small_volumes_equal_the_papers_tables(method: str) -> None:
    """Catches a collective counted twice, in the wrong phase or not at all, by the ledger or from the dispatched operators."""
    row = counting.row_of(method, SMALL, RANKS)
    assert row["differs"] == ""
    forward = {"dsp": "1/2", "ulysses": "1", "megatron_sp": "8", "megatron_tp": "8", "ring": "2"}
    training = {"dsp": "1", "ulysses": "3", "megatron_sp": "26", "megatron_tp": "24", "ring": "10"}
    assert (row["forward_m"], row["training_m"]) == (forward[method], training[method])
    assert row["m_numbers"] == 8 * 8 * 32


def test_a_method_that_cannot_spread_the_model_is_told() -> None:
    """Catches a size that is left out of the table, or an error that ends the run."""
    row = counting.row_of("ulysses", SMALL, 8)
    assert "heads is 4" in row["refused"]
    assert "forward_m" not in row


def test_a_wrong_volume_is_reported() -> None:
    """Catches a comparison that accepts any count."""
    layer = counting.layer_of("ulysses", SMALL, RANKS)
    one_less = Counter(layer.entries)
    [forward] = [entry for entry in one_less if entry.phase == "forward"]
    one_less[forward] -= 1
    found = counting.differences("ulysses", SMALL, RANKS, dataclasses.replace(layer, entries=one_less))
    assert [line.partition(": ")[2].split(",")[0] for line in found][:2] == [
        "{'all-to-all': 3} forward", "3/4 M forward",
    ]  # fmt: skip
    doubled = Counter({dataclasses.replace(forward, elements=2 * forward.elements): 4})
    found = counting.differences("ulysses", SMALL, RANKS, dataclasses.replace(layer, entries=doubled))
    assert any("an all-to-all of 1/2 M, table 8 says 1/4 M" in line for line in found)


def test_bytes_on_the_wire() -> None:
    """Catches a rank's own part that is counted as sent, and an all-reduce or a ring that is counted once too few."""
    x = torch.zeros(12, 5)
    sent = []
    with fake_group(4, rank=1) as group:
        for launch in (
            lambda: dist.all_to_all_single(torch.zeros(60), x.view(-1), [15] * 4, [30, 10, 10, 10], group.handle),
            lambda: _all_gather(torch.zeros(48, 5), x, group.handle),
            lambda: _reduce_scatter(torch.zeros(3, 5), x, group=group.handle),
            lambda: dist.all_reduce(x, group=group.handle),
            lambda: dist.send(x, 2, group.handle),
            lambda: dist.recv(x, 0, group.handle),
        ):
            with SentBytes(1, 4) as counter:
                launch()
            sent.append(counter.bytes // 4)
    assert sent == [50, 180, 45, 90, 60, 0]
