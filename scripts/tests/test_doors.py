"""The count of files that a reader opens: `scripts/doors.py`."""

from __future__ import annotations

from evodsp.parallel.exchange import LocalExchange
from evodsp.parallel.layout import shard_slice
from evodsp.ranges import memory_size
from scripts.doors import block, doors


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
    """Catches one more file for whoever reads a block; the number may only fall."""
    assert len(doors(block(LocalExchange()))) <= 17
