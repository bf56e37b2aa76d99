"""The count of files that a reader opens: `scripts/benchmarks/doors.py`."""

from __future__ import annotations

import inspect

from evodsp.model.pair_ops import TriangleAttention
from evodsp.parallel.exchange import LocalExchange, ShardedExchange
from evodsp.parallel.layout import shard_slice
from evodsp.ranges import memory_size
from scripts.benchmarks.doors import block, doors
from scripts.benchmarks.fake_ranks import fake_group


def test_files_are_those_of_the_calls() -> None:
    """Catches a count of what is called before, after or beside the function that it is about."""

    def outer() -> None:
        memory_size("--working_memory", "64MiB")
        inner()

    def inner() -> None:
        shard_slice(5, 2, 0)

    assert doors(outer) == ["parallel/layout.py", "ranges.py"]
    assert doors(outer, inner.__code__) == ["parallel/layout.py"]


def test_a_block_has_no_more_doors_than_it_had() -> None:
    """Catches a further file between a block and its numbers."""
    one = block(LocalExchange())
    assert len(doors(one, inspect.unwrap(TriangleAttention.forward).__code__)) <= 9
    assert len(doors(one)) <= 14
    with fake_group(2) as group:
        assert len(doors(block(ShardedExchange(group)))) <= 17
