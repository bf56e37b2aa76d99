"""Executors of a long job's pieces: processes of this machine, or the workers of a Dask cluster.

A piece may end the process that does it (out of memory, a crash of a parser). The other pieces are done in any case. Processes
of this machine say at once which piece it was. Dask gives up a piece whose workers die four times, and costs 70 MB of packages
and two seconds; hence it is used only where it is asked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

from evodsp.data.pool import Pool, WorkerEndedError
from evodsp.errors import UserError
from evodsp.printing import progress

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
    """What `LocalProcesses(workers)` yields of the pieces, with a line of progress, which calls them `what`."""
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
