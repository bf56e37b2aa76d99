"""The paper's section 5 as the planner calculates it: the program that is followed, and what is added to it."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from evodsp.planner.device import Links, load_device, load_link
from evodsp.planner.trace import Communication, Operation
from scripts.paper import modelled
from scripts.paper.counting import CLAIMS
from scripts.paper.experiments import Case
from scripts.paper.one_rank import follow, passes
from scripts.paper.workload import Workload

pytestmark = pytest.mark.verify

SMALL = Workload("tiny", time=8, rows=16, columns=16, checkpoint=True)
H100 = load_device(str(modelled.HERE / "h100.yaml"))
LINKS = Links(load_link("nvlink4"), load_link("infiniband"), 8)


@pytest.mark.parametrize("method", CLAIMS)
def test_the_program_is_the_one_that_is_counted(method: str) -> None:
    """A collective that the planner misses or sees twice, or memory that it does not follow: times of another program."""
    larger = dataclasses.replace(SMALL, rows=64, columns=64)
    found, counted = follow(method, larger, 4), passes(method, larger, 4)
    assert Counter(found.groups.layer_ledger.entries) == Counter(counted.layers)
    assert Counter(found.groups.end_ledger.entries) == Counter(counted.ends)
    assert found.parameters == counted.parameters
    # The planner leaves out tensors below 64 KiB, such as parameters in the backward pass.
    assert 0.9 * counted.peak < found.peak <= counted.peak
    sent = [event for event in found.events if isinstance(event, Communication)]
    hops = 3 + 3 + 7  # of a layer's keys and values: forward, again, and backward with those of the gradients
    layers = larger.config.layers
    calls = {"ring": hops * layers}.get(method, len(counted.layers))
    assert len(sent) == calls + len(counted.ends)


def test_floating_point_operations_are_those_of_the_formulas() -> None:
    """Attention or a linear layer that takes no time."""
    found = follow("one_device", SMALL, 1, training=False)
    config, tokens = SMALL.config, 8 * 16 * 16
    block = 24 * tokens * config.width**2
    attention = 4 * tokens * config.width * (8 + 16 * 16)
    ends = 2 * 2 * tokens * config.width * config.in_channels * 4
    flops = sum(event.flops for event in found.events if isinstance(event, Operation))
    assert flops == config.layers * (2 * block + attention) + ends


def test_collectives_alone_by_hand() -> None:
    """A method's collectives counted with another one's volume, or a ring with one hop too many."""
    rows = {method: modelled.collectives_alone(method, "720m", 8, LINKS) for method in CLAIMS}
    m = 2**23 * 1152 * 2  # bytes
    switch = 13e-6 + m / 8 * 7 / 8 / (0.9 * 370e9)
    assert rows["dsp"]["milliseconds"] == pytest.approx(2e3 * switch, abs=0.01)
    assert rows["ulysses"]["milliseconds"] == pytest.approx(4e3 * switch, abs=0.01)
    assert rows["megatron_tp"]["milliseconds"] == pytest.approx(4e3 * (13e-6 + 2 * m * 7 / 8 / 370e9), abs=0.01)
    assert rows["ring"]["milliseconds"] == pytest.approx(7e3 * (7e-6 + 2 * m / 8 / 370e9), abs=0.01)
    assert rows["dsp"]["counted_gb"] == pytest.approx(2 * m / 8 / 1e9, abs=0.01)
    assert rows["megatron_sp"]["paper_gbps"] == pytest.approx(8 * m / 1e9 / 51.908, abs=0.1)


def test_gradients_hide_where_the_link_is_idle() -> None:
    """Data-parallel communication that is free, or that nothing hides; an optimizer whose launch takes no time."""
    found = follow("dsp", SMALL, 2)
    case = Case("table4", "", "dsp", 2, 64, SMALL, training=True)
    times = modelled.timed(found, 2, H100, LINKS)
    few, many = 128 * 10**4, 128 * 10**8
    adam = modelled.ADAM * few / 128 / (3350e9 * 0.88)
    assert modelled.outside(case, few, times, H100, LINKS) == pytest.approx(adam)
    launched = dataclasses.replace(H100, kernel_us=2.0)
    assert modelled.outside(case, few, times, launched, LINKS) == pytest.approx(adam + 2e-6)
    reducing = LINKS.seconds("reduce-scatter", 4 * many, 128) + LINKS.seconds("all-gather", 2 * many, 128)
    adam = modelled.ADAM * many / 128 / (3350e9 * 0.88)
    assert modelled.outside(case, many, times, H100, LINKS) == pytest.approx(
        adam + reducing - (times.total - times.communication)
    )


def test_a_bar_without_a_number_says_why() -> None:
    """A size that does not fit, or that a method cannot spread, with a time."""
    refused = modelled.row_of(Case("table7", "", "ulysses", 3, 1, SMALL, training=True), H100, LINKS)
    assert refused["status"] == "x"
    assert "number of" in refused["reason"]
    assert refused["milliseconds"] == ""
    large = Workload("720m", time=1024, layers=1)
    row = modelled.row_of(Case("table7", "", "one_device", 1, 1, large, training=True), H100, LINKS)
    assert row["status"] == "x"
    assert row["reason"].startswith("out of memory: needs")
