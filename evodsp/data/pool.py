"""Work on many files in processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, TypeVar

from evodsp.errors import UserError

Result = TypeVar("Result")


def in_processes(function: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Result]:
    """`function(*job)` of every job, as they are finished; in this process if `workers` is at most 1.

    Raises UserError if a process is killed.
    """
    if workers <= 1:
        yield from (function(*job) for job in jobs)
        return
    # Not forked: what this process has read would be copied with it.
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent) as pool:
        try:
            for done in as_completed([pool.submit(function, *job) for job in jobs]):
                yield done.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed (out of memory?); run the command again with fewer --workers"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def processes(asked: int | None, jobs: int) -> int:
    """How many processes to use: those asked for, or one per core, but not more than there are jobs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores if asked is None else asked, jobs)


def end_with_parent() -> None:
    """In a process of a pool: end when the main process is gone, even if it was killed, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
