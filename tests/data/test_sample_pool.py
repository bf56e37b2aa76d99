"""Processes that make samples, and what happens to a sample whose process dies or is too slow."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.pool import DaskCluster, Executor, LocalProcesses, Pool, WorkerEndedError, _outcome, _work
from evodsp.data.samples.dataset import SampleDataset, SamplePool, _packed, layout_of, pack, packed_bytes, unpack
from evodsp.errors import FileFormatError, MachineError, UserError
from tests.builders.chains import MemoryStore


class Planted(SampleDataset):
    """Sample i is the number i and the pid of its process; some chains do what bad chains do."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), ("good",), FeatureConfig(), 0, training=True)

    def make(self, index: int, key: str) -> dict[str, torch.Tensor]:
        if key == "broken":
            raise FileFormatError("x.a3m", "cut short", line=7)
        if key == "killer":
            os.kill(os.getpid(), signal.SIGKILL)
        if key == "signalled":  # with all processes of the run, by SLURM
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(os.getpid(), number)
        if key == "sleeper":
            time.sleep(1000)
        if key == "tidy":
            util.Finalize(None, Path(os.environ["TIDIED"]).mkdir, exitpriority=0)
        if key == "greedy":
            raise MemoryError
        if key == "bug":
            raise IndexError("a mistake of the program")
        return {"aatype": torch.tensor([index]), "pid": torch.tensor(os.getpid())}


@pytest.fixture(scope="module")
def workers() -> Iterator[SamplePool]:
    pool = SamplePool(Planted(), 2, time_limit=4.0)
    yield pool
    pool.close()


def test_pools_of_a_process_share_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches workers that each import torch for themselves, for seconds, because the first pool of the process, which read
    chains, had no need of it: one process starts the workers of all pools, and imports what the first of them says."""
    said: list[str] = []
    monkeypatch.setattr(ForkServerContext, "set_forkserver_preload", lambda _, modules: said.extend(modules))
    Pool(abs, 0).close()
    assert {"builtins", SamplePool.__module__} <= set(said)


def test_bad_chains_fail_alone_and_workers_are_replaced(workers: SamplePool) -> None:
    """A pool that ends with its first dead worker, blames another sample for it, or waits for one that sleeps."""
    keys = ["good", "killer", "signalled", "broken", "sleeper", "greedy", "bug", *["good"] * 6]
    futures = [workers.submit(index, key) for index, key in enumerate(keys)]
    said = {}
    for index, (key, future) in enumerate(zip(keys, futures, strict=True)):
        error = future.exception(timeout=120)
        if key in ("good", "signalled"):
            assert error is None
            assert future.result()["aatype"].tolist() == [index]
        else:
            said[key] = error
    assert str(said["broken"]) == "x.a3m:7: cut short"
    assert "killed by SIGKILL (out of memory?)" in str(said["killer"])
    assert str(said["sleeper"]) == "took longer than data.time_limit, 4 s"
    assert "out of memory" in str(said["greedy"])
    assert all(isinstance(said[key], UserError) for key in ("broken", "killer", "sleeper", "greedy"))
    assert isinstance(said["bug"], RuntimeError)
    assert "IndexError: a mistake of the program" in str(said["bug"])
    assert os.getpid() not in {int(future.result()["pid"]) for future in futures[7:]}


def test_a_slow_sample_holds_up_no_other() -> None:
    """Samples made in order: one worker with a large chain would leave the others idle."""
    pool = SamplePool(Planted(), 2)
    slow = pool.submit(0, "sleeper")
    assert [pool.submit(i, "good").result(timeout=120)["aatype"].item() for i in range(3)] == [0, 1, 2]
    assert not slow.done()
    pool.close()


def test_a_closed_pool_leaves_no_process_and_no_waiting() -> None:
    """Workers that outlive a run, or a thread that waits for a sample for ever."""
    pool = SamplePool(Planted(), 1)
    pid = int(pool.submit(0, "good").result(timeout=120)["pid"])
    waiting = pool.submit(1, "sleeper")
    pool.close()
    assert waiting.exception(timeout=10) is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


LEAVING = """
from evodsp.__main__ import leave
from evodsp.data.samples.dataset import SamplePool
from tests.data.test_sample_pool import Planted
if __name__ == "__main__":
    pool = SamplePool(Planted(), 2)
    pool.submit(0, "good").result(timeout=120)
    {end}
"""


@pytest.mark.verify_but("closed")
@pytest.mark.parametrize(
    ("end", "code"),
    [("pool.close(); leave(0)", 0), ("leave(130)", 130), ("pass", 0)],
    ids=["closed", "interrupted", "forgotten"],
)
def test_nothing_is_left_in_the_folder_of_temporary_files(end: str, code: int, tmp_path: Path) -> None:
    """Each training would leave a folder: workers end at once, without removing the sockets by which they hand tensors over.
    And a program that forgets its pool would never end: Python waits for workers, which ignore its SIGTERM."""
    program = tmp_path / "program.py"
    program.write_text(LEAVING.format(end=end))
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(program)], env=environment, timeout=300)
    assert done.returncode == code
    assert [path.name for path in temporary.glob("pymp-*")] == []


def test_a_worker_ends_without_tidying_up(tmp_path: Path) -> None:
    """Catches a traceback after the message of a run: a worker that finds its pipe closed removes its socket, whose folder the
    training process has removed already."""
    context = multiprocessing.get_context("forkserver")
    (ours, theirs), (lifeline, held) = context.Pipe(), context.Pipe(duplex=False)
    worker = context.Process(target=_tidied, args=(theirs, lifeline, tmp_path / "tidied"))
    worker.start()
    theirs.close()
    assert ours.recv() == "ready"
    ours.send((0, "tidy"))
    assert ours.recv()[0] == "result"
    ours.close()
    worker.join(120)
    held.close()
    assert worker.exitcode == 0
    assert not (tmp_path / "tidied").exists()


def _tidied(pipe: Connection, lifeline: Connection, trace: Path) -> None:
    os.environ["TIDIED"] = str(trace)
    _work(pipe, lifeline, partial(_packed, Planted()))


def test_workers_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started again and again, for ever."""
    monkeypatch.setattr("evodsp.data.pool._work", os.abort)
    pool = SamplePool(Planted(), 1)
    with pytest.raises(RuntimeError, match="workers end before they begin"):
        pool.submit(0, "good").result(timeout=120)
    pool.close()


def test_a_killed_server_of_workers_is_one_line() -> None:
    """Catches `EOFError: unexpected EOF` with a traceback where the process that starts workers was killed."""

    class Killed(ForkServerContext.Process):  # type: ignore[misc, name-defined]
        def start(self) -> None:
            raise EOFError("unexpected EOF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServerContext, "Process", Killed)
        with pytest.raises(MachineError, match="the process that starts workers was killed"):
            SamplePool(Planted(), 1)


def test_full_shared_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's traceback in a container with 64 MB of shared memory, and a chain that is left out because of it."""

    def full(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    kind, error = _outcome(partial(_packed, Planted()), (0, "good"))
    assert (kind, type(error)) == ("mistake", MachineError)
    assert re.search(r"/dev/shm.* --shm-size 8g.*--data.num_workers 0", str(error))


def test_a_packed_sample_is_the_sample() -> None:
    """A tensor of another type or shape, an empty one, or one that overlaps its neighbour."""
    sample = {
        "scalar": torch.tensor(2.5),
        "odd": torch.arange(7, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
        "long": torch.arange(6).view(2, 3),
        "flag": torch.tensor([True, False]),
    }
    layout = layout_of(sample)
    memory = torch.empty(packed_bytes(layout), dtype=torch.uint8)
    pack(sample, memory)
    found = unpack(layout, memory)
    assert list(found) == list(sample)
    for name, value in sample.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


# Executors: every piece is done once, wherever, and none of them costs another.


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
