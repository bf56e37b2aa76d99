"""The count of files that a reader opens: `scripts/benchmarks/doors.py`."""

from __future__ import annotations

from evodsp.errors import memory_size
from evodsp.parallel.collectives import shard_slice
from scripts.benchmarks.doors import counted, doors
from tests.builders.pages import table


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

    assert doors(outer) == ["errors.py", "parallel/collectives.py"]
    assert doors(outer, inner.__code__) == ["parallel/collectives.py"]


def test_nothing_has_more_doors_than_it_had() -> None:
    """Catches a further file on the way through a block, a training step or a prediction. What another test's prediction keeps
    in this process is not executed again: then the count is lower."""
    most = {name: int(files) for name, files in table("| doors |")}
    found = {name: len(files) for name, files in counted().items()}
    assert found.keys() == most.keys()
    assert {name: files for name, files in found.items() if files > most[name]} == {}, "CONTRIBUTING.md has the budget"
