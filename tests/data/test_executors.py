"""Executors: every piece is done once, wherever, and none of them costs another."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

import pytest

from evodsp.data.pool import DaskCluster, Executor, LocalProcesses, WorkerEndedError
from evodsp.errors import FileFormatError, UserError

needs_dask = pytest.mark.skipif(find_spec("distributed") is None, reason="the extra `cluster` is not installed")


def do(what: str, number: int) -> tuple[int, int]:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "mistake":
        raise FileFormatError("a.txt", "cut short", 3)
    if what == "disk":
        raise OSError(28, "No space left on device", "b.txt")
    return number, os.getpid()


def done_by(executor: Executor) -> set[int]:
    """The processes that do nine pieces."""
    done = dict(executor.map(do, [("work", 10 + number) for number in range(9)]))
    assert {number: result[0] for number, result in done.items()} == {number: 10 + number for number in range(9)}
    return {pid for _, pid in done.values()}


def test_every_piece_is_done_once() -> None:
    """Catches a piece that is lost, done twice or given another's number, and one that is done here although processes were
    asked for."""
    assert os.getpid() not in done_by(LocalProcesses(2))
    assert os.getpid() not in done_by(LocalProcesses(1, isolated=True))
    assert done_by(LocalProcesses(1)) == {os.getpid()}
    assert list(LocalProcesses(2, isolated=True).map(do, [])) == []


@needs_dask
def test_every_piece_is_done_once_on_a_cluster() -> None:
    """Catches numbers that are not those of the pieces, and an error that is not the function's."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster:
        executor = DaskCluster(cluster.scheduler_address, 1)
        assert done_by(executor) == {os.getpid()}
        with pytest.raises(OSError, match="No space left"):
            list(executor.map(do, [("disk", 1)]))


def test_a_piece_that_ends_its_process_costs_no_other() -> None:
    """Catches pieces that are lost with a process, and one whose end nobody is told."""
    pieces = [("work", 1), ("die", 2), ("work", 3), ("die", 4), ("work", 5)]
    done = dict(LocalProcesses(2).map(do, pieces))
    assert sorted(done) == [0, 1, 2, 3, 4]
    ended = {number for number, result in done.items() if isinstance(result, WorkerEndedError)}
    assert ended == {1, 3}
    assert "killed by SIGKILL (out of memory?)" in str(done[1])


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("mistake", UserError, r"^a\.txt:3: cut short$"),
        ("disk", OSError, r"\[Errno 28\] No space left on device: 'b\.txt'"),
    ],
)
def test_what_a_piece_raises_is_told(what: str, kind: type[Exception], said: str) -> None:
    """Catches an error that cannot be sent, such as one whose constructor takes other arguments, and a wait without end."""
    with pytest.raises(kind, match=said):
        list(LocalProcesses(2).map(do, [("work", 1), (what, 2), ("work", 3)]))
