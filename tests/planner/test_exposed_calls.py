"""The list of a block's collectives with what each one exposes."""

from __future__ import annotations

import pytest

from evodsp.planner.simulate import Interval
from scripts.benchmarks.exposed_calls import blocks


def test_a_wait_belongs_to_the_collective_that_ends_with_it() -> None:
    """Exposure that is charged to the collective of another block, or to the one that began last."""
    inner, other = ("evoformer", 1), ("evoformer", 2)
    intervals = [
        Interval(inner, "forward", "all-gather", 1.0, 4.0),
        Interval(inner, "forward", "all-to-all", 4.0, 9.0),
        Interval(inner, "forward", "compute", 1.0, 3.0),
        Interval(inner, "forward", "wait", 3.0, 4.0),
        Interval(inner, "forward", "compute", 4.0, 6.0),
        Interval(other, "forward", "wait", 6.0, 9.0),
        Interval(inner, "backward", "compute", 10.0, 11.0),
    ]
    block = blocks(intervals, "forward")
    assert [(call.kind, call.seconds, call.exposed) for call in block.calls] == [
        ("all-gather", 3.0, 1.0),
        ("all-to-all", 5.0, 3.0),
    ]
    assert (block.computing, block.exposed) == pytest.approx((4.0, 4.0))
    assert blocks(intervals, "backward").computing == 1.0
