"""The count of files that a reader opens: `scripts/benchmarks/doors.py`. The numbers only go down."""

from __future__ import annotations

import inspect
from pathlib import Path

from evodsp.model.pair_ops import TriangleAttention
from evodsp.parallel.exchange import LocalExchange
from evodsp.parallel.layout import shard_slice
from evodsp.ranges import memory_size
from scripts.benchmarks.doors import (
    STEP,
    STEP_WITH_SAMPLES,
    block,
    doors,
    fit,
    prediction,
    trained_blocks,
    two_ranks,
)


def test_files_are_those_of_the_last_call() -> None:
    """Catches a count of what is called before, after or beside the function that it is about, or at its first call only."""

    def outer() -> None:
        memory_size("--working_memory", "64MiB")
        inner(first=True)
        inner(first=False)

    def inner(first: bool) -> None:
        if first:
            memory_size("--working_memory", "64MiB")
        else:
            shard_slice(5, 2, 0)

    assert doors(outer) == ["parallel/layout.py", "ranges.py"]
    assert doors(outer, inner.__code__) == ["parallel/layout.py"]


def test_a_block_has_no_more_doors_than_it_had() -> None:
    """Catches a further file between a block and its numbers."""
    one = block(LocalExchange())
    assert len(doors(one, inspect.unwrap(TriangleAttention.forward).__code__)) <= 9
    assert len(doors(one)) <= 14
    assert len(doors(trained_blocks(LocalExchange()))) <= 19
    with two_ranks() as exchange:
        assert len(doors(block(exchange))) <= 17
        assert len(doors(trained_blocks(exchange))) <= 22


def test_a_training_step_has_no_more_doors_than_it_had(tmp_path: Path) -> None:
    """Catches a further file between a chain's files and the weights after a step."""
    assert len(doors(fit(tmp_path / "step"), STEP)) <= 47
    assert len(doors(fit(tmp_path / "samples"), STEP_WITH_SAMPLES)) <= 88


def test_a_prediction_has_no_more_doors_than_it_had(tmp_path: Path) -> None:
    """Catches a further file between a sequence and its structure. What another test's prediction keeps in this process is not
    executed again, so that the count is at most that of a process of its own."""
    assert len(doors(prediction(tmp_path))) <= 122
