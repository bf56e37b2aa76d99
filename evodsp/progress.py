"""Shows the progress of long work on standard error, with the time left: a bar on a terminal, otherwise a line every 20
seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evodsp.printing import tell
from evodsp.reading.quoting import printable

SECONDS_BETWEEN_LINES = 20.0


def duration(seconds: float) -> str:
    """A time in the largest unit of which it has at least two: '95 s', '12 min', '3.4 h'. An infinite time is 'inf s'."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of further items, of `total`, that are finished. `done`: number finished in an
    earlier run.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(printable(what), total=total, completed=done)
            yield lambda more: bar.advance(task, more)
        return
    begun = last = time.monotonic()
    finished = done

    def advance(more: int) -> None:
        nonlocal finished, last
        finished += more
        now = time.monotonic()
        if now - last > SECONDS_BETWEEN_LINES:
            last = now
            left = (now - begun) / max(1, finished - done) * (total - finished)
            tell(f"{what}: {finished:,} of {total:,}, {duration(left)} left")

    yield advance
