"""Processes that make samples: out of order, several at a time, with a time limit, and none of them can end the run by dying.

`torch.utils.data.DataLoader` raises an error when a worker is killed and cannot be used any more, has no time limit per
sample, and does not say which sample a worker was making. `concurrent.futures.ProcessPoolExecutor` breaks in the same way;
pebble has time limits and survives, but sends results through one pipe that all workers share, pickled, where each of our
workers has a pipe of its own and results stay in shared memory.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, runtime_checkable

import torch
import torch.multiprocessing as multiprocessing

from evodsp.data.dataset import ChainDataset, Sample
from evodsp.data.packing import layout_of, pack, packed_bytes, unpack
from evodsp.errors import UserError

_MOST_FAILED_STARTS = 3
"""So many workers may die one after another before they are ready; then something is wrong with the machine, not a chain."""


@runtime_checkable
class SampleMaker(Protocol):
    """Makes samples of given chains."""

    def submit(self, index: int, key: str) -> Future[Sample]:
        """Sample `index` of the chain `key`. The future raises UserError if the chain cannot be made into a sample.

        Any other exception is a bug, of the data code or of this module.
        """

    def close(self) -> None:
        """End what runs in the background."""


class MadeHere:
    """Makes samples in the calling process, when they are asked for."""

    def __init__(self, samples: ChainDataset) -> None:
        self._samples = samples

    def submit(self, index: int, key: str) -> Future[Sample]:
        """See `SampleMaker.submit`."""
        future: Future[Sample] = Future()
        try:
            future.set_result(self._samples.make(index, key))
        except UserError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class _Task:
    index: int
    key: str
    future: Future[Sample] = field(default_factory=Future)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    lifeline: Connection
    """Closed when this process is gone; the worker then ends itself, even in the middle of a sample."""
    ready: bool = False
    task: _Task | None = None
    since: float = 0.0
    """When the task was sent (`time.monotonic`)."""


class SamplePool:
    """`workers` processes, each with at most one sample in hand, so that it is known which chain killed it.

    A worker that dies, or needs longer than `time_limit` seconds for a sample (None: no limit), is replaced; the sample's
    future raises UserError. The lowest sample is begun first. On a machine with a GPU they arrive
    in pinned memory.
    """

    def __init__(self, samples: ChainDataset, workers: int, time_limit: float | None = None) -> None:
        self._samples, self._time_limit = samples.without_keys(), time_limit
        # Not fork: this process has threads by now (logger, progress, OpenMP), and a fork would inherit locks they hold.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [__name__]
        )  # torch is imported once, and a worker starts within milliseconds
        # Workers end at once, without removing the sockets that they made. If the process that starts them has a folder for
        # such things, they use that one, which goes when that process ends.
        util.get_temp_dir()
        self._lock = threading.Lock()
        self._tasks: list[tuple[int, int, _Task]] = []
        """A heap: the lowest sample is needed first, also if it was submitted again after its first chain failed."""
        self._submitted = itertools.count()
        self._wake, self._woken = multiprocessing.Pipe(duplex=False)[::-1]
        self._closed = False
        self._failed_starts = 0
        self._error: BaseException | None = None
        self._workers = [self._start() for _ in range(workers)]
        self._thread = threading.Thread(target=self._serve, name="evodsp samples", daemon=True)
        self._thread.start()
        # Python would end the workers of a pool that nobody has closed by SIGTERM, which they ignore, and wait for ever.
        self._at_exit = util.Finalize(None, self.close, exitpriority=0)

    def submit(self, index: int, key: str) -> Future[Sample]:
        """See `SampleMaker.submit`. A future that is cancelled before its sample is begun costs nothing."""
        task = _Task(index, key)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the pool is closed")
            heapq.heappush(self._tasks, (index, next(self._submitted), task))
        self._wake.send(None)
        return task.future

    def close(self) -> None:
        """End all workers, in the middle of a sample too."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._at_exit.cancel()
        self._wake.send(None)
        self._thread.join()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        lifeline, held = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(theirs, lifeline, self._samples), daemon=True)
        process.start()
        theirs.close()
        lifeline.close()
        return _Worker(process, ours, held)

    def _serve(self) -> None:
        """The thread that hands out tasks and receives samples."""
        try:
            while True:
                with self._lock:
                    if self._closed:
                        break
                    self._assign()
                watched = [worker.pipe for worker in self._workers] + [w.process.sentinel for w in self._workers]
                wait([self._woken, *watched], self._patience())
                while self._woken.poll():
                    self._woken.recv()
                for place, worker in enumerate(self._workers):
                    self._attend(place, worker)
        except BaseException as error:  # whoever waits for a sample must hear of it: this thread cannot end the run
            with self._lock:
                self._error = error
        finally:
            self._end()

    def _assign(self) -> None:
        for worker in self._workers:
            while worker.ready and worker.task is None and self._tasks:
                *_, task = heapq.heappop(self._tasks)
                if task.future.set_running_or_notify_cancel():
                    worker.task, worker.since = task, time.monotonic()
                    with contextlib.suppress(OSError):  # it has died meanwhile, which `_attend` sees
                        worker.pipe.send((task.index, task.key))

    def _patience(self) -> float | None:
        """Seconds until the next time limit."""
        begun = [worker.since for worker in self._workers if worker.task is not None]
        if self._time_limit is None or not begun:
            return None
        return max(0.0, min(begun) + self._time_limit - time.monotonic())

    def _attend(self, place: int, worker: _Worker) -> None:
        """Receive what a worker sent; replace it if it died or is too slow."""
        alive = worker.process.is_alive()  # asked first: what it sent before it died is in the pipe by then
        try:
            while worker.pipe.poll():
                self._received(worker, worker.pipe.recv())
        except (EOFError, OSError):
            alive = False
        late = (
            self._time_limit is not None
            and worker.task is not None
            and time.monotonic() - worker.since >= self._time_limit
        )
        if alive and not late:
            return
        worker.process.kill()
        worker.process.join()
        if worker.task is not None:
            reason = _how_it_ended(worker.process.exitcode)
            if alive:
                reason = f"took longer than data.time_limit, {self._time_limit:g} s"
            worker.task.future.set_exception(UserError(reason))
        elif not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise RuntimeError(f"workers end before they begin: {_how_it_ended(worker.process.exitcode)}")
        worker.pipe.close()
        worker.lifeline.close()
        self._workers[place] = self._start()

    def _received(self, worker: _Worker, message: Any) -> None:
        task, worker.task = worker.task, None
        if task is None:
            worker.ready, self._failed_starts = True, 0
            return
        kind, content = message
        if kind == "sample":
            layout, memory = content
            task.future.set_result(unpack(layout, memory.pin_memory() if torch.cuda.is_available() else memory))
        elif kind == "mistake":
            task.future.set_exception(UserError(content))
        else:
            bug = RuntimeError(f"sample {task.index}, chain {task.key}, in a worker process:\n{content}")
            task.future.set_exception(bug)

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        with self._lock:
            error = self._error or RuntimeError("the pool was closed")
            left = [worker.task for worker in self._workers if worker.task is not None]
            left += [task for *_, task in self._tasks if task.future.set_running_or_notify_cancel()]
            self._tasks.clear()
        for task in left:
            task.future.set_exception(error)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"its worker process ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"its worker process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _work(pipe: Connection, lifeline: Connection, samples: ChainDataset) -> None:
    """A worker process: makes the samples that it is sent."""
    # These are for the training process, which saves and ends; SLURM sends them to all processes of a step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=[lifeline], daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send("ready")
        while True:
            index, key = pipe.recv()
            pipe.send(_outcome(samples, index, key))
    # Python would remove this process's sockets first, in a folder that the training process may have removed by now.
    os._exit(0)


def _outcome(samples: ChainDataset, index: int, key: str) -> tuple[str, Any]:
    try:
        sample = samples.make(index, key)
        layout = layout_of(sample)
        # One piece of shared memory: one open file instead of one for each of its sixty tensors.
        memory = torch.empty(packed_bytes(layout), dtype=torch.uint8).share_memory_()
        pack(sample, memory)
        return "sample", (layout, memory)
    except UserError as error:
        return "mistake", str(error)
    except MemoryError:
        return "mistake", "its worker process was out of memory"
    except Exception:
        return "bug", traceback.format_exc()


def _end_with(lifeline: Connection) -> None:
    """End this process at once when the one that started it is gone."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(0)
