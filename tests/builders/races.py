"""Processes that want one lock at the same moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import lock


def hold(path: str) -> None:
    """Say that the lock is held, and hold it until this process is killed."""
    with lock(Path(path), Path(path).parent, "trains there"):
        print("held", flush=True)
        time.sleep(600)


def race(taken: Callable[[], AbstractContextManager[None]], takers: int = 4) -> int:
    """How many of the threads get the lock, which each keeps until all have tried. The kernel tells open files apart, not
    processes; so threads race as processes do."""
    begin, end = threading.Barrier(takers), threading.Barrier(takers)
    won = []

    def take() -> None:
        begin.wait()
        try:
            with taken():
                won.append(1)
                end.wait()
        except UserError:
            end.wait()

    threads = [threading.Thread(target=take) for _ in range(takers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(won)
