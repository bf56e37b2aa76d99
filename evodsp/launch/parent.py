"""Ends a rank when the `evodsp` that started it is gone.

The launcher ends its ranks itself, unless it is killed (SIGKILL, or out of memory). Then nobody would end them, and they would
keep the cores or GPUs. No torch is imported here: the watch begins before the slow imports.
"""

from __future__ import annotations

import os
import sys
import threading
import time

LAUNCHER = "EVODSP_LAUNCHER_PID"
"""Variable in which the launcher passes its process id to the ranks that it starts."""

GIVEN_UP = 3
"""Exit code of a rank that ended because of another process."""

STOPPED = 75
"""Exit code of a training run that was asked to stop, has saved, and can go on (EX_TEMPFAIL of sysexits.h: try again later)."""

_POLL_S = 1.0


def end_with_launcher() -> None:
    """In a rank that `evodsp` started: end this process within seconds after the launcher. In other processes: do nothing."""
    launcher = os.environ.pop(LAUNCHER, None)  # not for the processes that this one starts
    if launcher is not None:
        threading.Thread(target=_wait_for_end_of, args=[int(launcher)], name="evodsp parent", daemon=True).start()


def _wait_for_end_of(parent: int) -> None:
    """Poll until this process has another parent: a process whose parent has died is adopted."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    print(f"evodsp: error: the launcher (pid {parent}) is gone; this rank is ended", file=sys.stderr, flush=True)
    os._exit(GIVEN_UP)
