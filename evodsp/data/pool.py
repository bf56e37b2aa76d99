"""Processes that do jobs: out of order, several at a time, with a time limit, and none of them can end the program by
dying.

`concurrent.futures.ProcessPoolExecutor` and loky give up all jobs when one of their processes dies, and do not say which job
it had; nor does `torch.utils.data.DataLoader`. pebble has time limits and survives, but sends results through one pipe that
all workers share, where each of our workers has a pipe of its own. This module does not import torch.

Executors do a long job's pieces: processes of this machine, or the workers of a Dask cluster. A piece may end the process
that does it (out of memory, a crash of a parser). The other pieces are done in any case. Processes of this machine say at
once which piece it was. Dask gives up a piece whose workers die four times, and costs 70 MB of packages and two seconds;
hence it is used only where it is asked for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from evodsp.errors import MachineError, UserError
from evodsp.printing import progress, shown

LOCAL = "local"
"""The word that stands for a Dask cluster of this machine, in place of a scheduler's address."""

Piece = tuple[Any, ...]


@dataclass(frozen=True)
class LocalProcesses:
    """`workers` processes of this machine. Without `isolated`, a single worker is this process, which starts at once."""

    workers: int
    isolated: bool = False

    def map(self, function: Callable[..., Any], pieces: Sequence[Piece]) -> Iterator[tuple[int, Any]]:
        """Call `function(*piece)` for every piece. Yields the number of each finished piece and its result, in any order.

        The result of a piece that ended its process is a WorkerEndedError. An error that the function raises is raised, after
        which no more pieces are begun. If the caller stops, the processes are ended.
        """
        workers = min(self.workers, len(pieces))
        if workers <= 1 and not self.isolated:
            yield from ((number, function(*piece)) for number, piece in enumerate(pieces))
            return
        pool: Pool[Any] = Pool(function, workers)
        try:
            number_of = {pool.submit(*piece): number for number, piece in enumerate(pieces)}
            for done in as_completed(number_of):
                try:
                    result = done.result()
                except WorkerEndedError as error:
                    result = error
                yield number_of[done], result
        finally:
            pool.close()


def with_progress(
    what: str, function: Callable[..., Any], pieces: Sequence[Piece], workers: int
) -> Iterator[tuple[int, Any]]:
    """Results of `LocalProcesses(workers)` for the pieces, with a line of progress, which calls the pieces `what`."""
    with progress(what, len(pieces)) as advance:
        for done in LocalProcesses(workers).map(function, pieces):
            yield done
            advance(1)


@dataclass(frozen=True)
class DaskCluster:
    """The workers of the Dask scheduler at `address`, which must see the same folders.

    If `address` is LOCAL, a Dask cluster of `workers` processes runs on this machine, and ends with the job.
    """

    address: str
    workers: int

    def map(self, function: Callable[..., Any], pieces: Sequence[Piece]) -> Iterator[tuple[int, Any]]:
        """As `LocalProcesses.map`. Raises UserError if distributed is not installed or the scheduler does not answer."""
        try:
            from distributed import Client, KilledWorker, LocalCluster
            from distributed import as_completed as completed
        except ImportError as error:
            raise UserError(
                "--scheduler needs Dask, which is not installed; run: pip install 'evodsp[cluster]'"
            ) from error
        address, workers = self.address, max(1, min(self.workers, len(pieces)))
        with contextlib.ExitStack() as stack:
            try:
                if address == LOCAL:  # port 0: a dashboard beside those of other clusters
                    cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
                    address = stack.enter_context(cluster).scheduler_address
                client = stack.enter_context(Client(address))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"--scheduler {address}: no Dask scheduler answers there ({error}); check the address"
                ) from error
            number_of = {client.submit(function, *piece, pure=False): number for number, piece in enumerate(pieces)}
            for future in completed(list(number_of)):
                try:
                    result = future.result()
                except KilledWorker as error:
                    result = WorkerEndedError(f"its workers were ended again and again ({error})")
                yield number_of[future], result


Executor = LocalProcesses | DaskCluster
"""Calls a function with many pieces, in other processes."""


def processes(asked: int | None) -> int:
    """The number of processes to use: as many as are asked for, or one per core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if asked is None else asked


def processes_for(pieces: int, most: int) -> int:
    """One process for up to `most` pieces, which are done before others have started; otherwise one per core."""
    return 1 if pieces <= most else processes(None)


def executor(scheduler: str | None, workers: int | None, isolated: bool = False) -> Executor:
    """The executor that the options `--scheduler` and `--workers` of a command ask for."""
    number = processes(workers)
    return LocalProcesses(number, isolated) if scheduler is None else DaskCluster(scheduler, number)


Result = TypeVar("Result")
_MOST_FAILED_STARTS = 3
"""If n workers in a row die before they are ready, something is wrong with the machine, not with a job."""


class WorkerEndedError(UserError):
    """A process died, or took too long, with a job. The message says why."""


@dataclass(frozen=True)
class _Task:
    job: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    lifeline: Connection
    """A pipe that closes when this process is gone; the worker then ends itself, even in the middle of a job."""
    ready: bool = False
    task: _Task | None = None
    since: float = 0.0
    """The time at which the task was sent (`time.monotonic`)."""


class Pool(Generic[Result]):
    """`workers` processes that call `function`, each with at most one job in hand, so that it is known which job killed it.

    A worker that dies, or needs longer than `time_limit` seconds for a job (None: no limit), is replaced. `limit_name` is the
    limit's name for the user. `received`: the function that this process applies to each result that arrives.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        workers: int,
        time_limit: float | None = None,
        limit_name: str = "the limit",
        received: Callable[[Any], Result] = lambda result: result,
    ) -> None:
        self._function, self._received = function, received
        self._time_limit, self._limit_name = time_limit, limit_name
        # Not fork: this process has threads by now (logger, progress, OpenMP), and a fork would inherit locks they hold. And
        # what it has read would be copied.
        self._context = multiprocessing.get_context("forkserver")
        module = getattr(function.func if isinstance(function, partial) else function, "__module__", __name__)
        # The server of all pools of this process imports once what workers need, so that they start within milliseconds: the
        # function, and what this process has imported for its other pools.
        mine = __name__.rpartition("pool")[0]
        self._context.set_forkserver_preload([module, *(name for name in sorted(sys.modules) if name.startswith(mine))])
        # Workers end at once, without removing the sockets that they made. If the process that starts them has a folder for
        # such things, they use that one, which goes when that process ends.
        util.get_temp_dir()
        self._lock = threading.Lock()
        self._tasks: list[tuple[int, int, _Task]] = []
        """A heap: the lowest number is needed first, also if it was submitted again after its first job failed."""
        self._submitted = itertools.count()
        self._wake, self._woken = multiprocessing.Pipe(duplex=False)[::-1]
        self._closed = False
        self._failed_starts = 0
        self._error: BaseException | None = None
        self._workers = [self._start() for _ in range(workers)]
        self._thread = threading.Thread(target=self._serve, name="evodsp pool", daemon=True)
        self._thread.start()
        # Python would end the workers of a pool that nobody has closed by SIGTERM, which they ignore, and wait for ever.
        self._at_exit = util.Finalize(None, self.close, exitpriority=0)

    def submit(self, *job: Any, number: int = 0) -> Future[Result]:
        """Have `function(*job)` called; jobs with a lower `number` are begun first, jobs with the same number in order.

        The future raises UserError and OSError as the function does, WorkerEndedError if its process died or took too long, and
        RuntimeError for anything else. A future that is cancelled before its job is begun costs nothing.
        """
        task = _Task(job)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the pool is closed")
            heapq.heappush(self._tasks, (number, next(self._submitted), task))
        self._wake.send(None)
        return task.future

    def close(self) -> None:
        """End all workers, in the middle of a job too."""
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
        process = self._context.Process(target=_work, args=(theirs, lifeline, self._function), daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise MachineError(
                "the process that starts workers was killed (out of memory?); start again, or take fewer workers"
            ) from error
        theirs.close()
        lifeline.close()
        return _Worker(process, ours, held)

    def _serve(self) -> None:
        """The thread that hands out tasks and receives results."""
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
        except BaseException as error:  # whoever waits for a result must hear of it: this thread cannot end the program
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
                        worker.pipe.send(task.job)

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
                self._take(worker, worker.pipe.recv())
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
                reason = f"took longer than {self._limit_name}, {self._time_limit:g} s"
            worker.task.future.set_exception(WorkerEndedError(reason))
        elif not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise RuntimeError(f"workers end before they begin: {_how_it_ended(worker.process.exitcode)}")
        worker.pipe.close()
        worker.lifeline.close()
        self._workers[place] = self._start()

    def _take(self, worker: _Worker, message: Any) -> None:
        task, worker.task = worker.task, None
        if task is None:
            worker.ready, self._failed_starts = True, 0
            return
        kind, content = message
        if kind == "result":
            task.future.set_result(self._received(content))
        elif kind == "mistake":
            task.future.set_exception(content)
        else:
            task.future.set_exception(RuntimeError(f"job {shown(task.job)}, in a worker process:\n{content}"))

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


def _work(pipe: Connection, lifeline: Connection, function: Callable[..., Any]) -> None:
    """A worker process: does the jobs that it is sent."""
    # These are for the main process, which saves and ends; SLURM sends them to all processes of a step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[lifeline], daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send("ready")
        while True:
            job = pipe.recv()
            pipe.send(_outcome(function, job))
    # Python would remove this process's sockets first, in a folder that the main process may have removed by now.
    os._exit(0)


def _outcome(function: Callable[..., Any], job: tuple[Any, ...]) -> tuple[str, Any]:
    """The message to send: a result, or an error in a form that can be sent, because not every error survives pickling."""
    try:
        return "result", function(*job)
    except UserError as error:
        return "mistake", (MachineError if isinstance(error, MachineError) else UserError)(str(error))
    except OSError as error:
        plain = (error.errno, error.strerror, error.filename) if error.errno else (str(error),)
        return "mistake", OSError(*plain)
    except MemoryError:
        return "mistake", UserError("its worker process was out of memory")
    except Exception:
        return "bug", traceback.format_exc()


def _end_with(lifeline: Connection) -> None:
    """End this process at once when the one that started it is gone."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(0)
