"""Messages between a rank and the program that started it; ends a rank when the `evodsp` that started it is gone.

The launcher ends its ranks itself, unless it is killed (SIGKILL, or out of memory). Then nobody would end them, and they would
keep the cores or GPUs. No torch is imported here: the watch begins before the slow imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evodsp.printing import tell

OWN_RUN = "evodsp"
"""The name that the launcher of `evodsp` gives its runs, where torchrun gives them a number."""

LAUNCHER = "EVODSP_LAUNCHER_PID"
"""Variable in which the launcher passes its process id to the ranks that it starts."""

GIVEN_UP = 3
"""Exit code of a rank that ended because of another process."""

STOPPED = 75
"""Exit code of a training run that was asked to stop, has saved, and can go on (EX_TEMPFAIL of sysexits.h: try again later)."""

STOPPED_FILE = "EVODSP_STOPPED_FILE"
"""Variable in which a batch script names a file that a run makes which was asked to stop: torchrun hides the code STOPPED. It
should be in the run's output folder, which a container sees as the script does."""

_POLL_S = 1.0


def launched_by_evodsp(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher of `evodsp` started this process as a rank: it shows the output of one rank only."""
    return environment.get("TORCHELASTIC_RUN_ID") == OWN_RUN


def starts_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a torchrun started this process as a rank, and would start all ranks again if it failed."""
    if launched_by_evodsp(environment):
        return False
    used, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return used.isdecimal() and most.isdecimal() and int(used) < int(most)


def tell_stopped(environment: Mapping[str, str] = os.environ) -> None:
    """Make the batch script's file STOPPED_FILE. Its folder may be on one machine only: ranks of others make none."""
    if name := environment.get(STOPPED_FILE):
        with contextlib.suppress(OSError):
            Path(name).touch()


@contextmanager
def same_handlers() -> Iterator[None]:
    """For a program that goes on after a command: signals are handled as before. Otherwise a run that was asked to stop keeps
    its handlers, so that one more signal, before the process has ended, does not change the exit code."""
    former = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a rank that `evodsp` started: end this process within seconds after the launcher. In other processes: do nothing."""
    launcher = os.environ.pop(LAUNCHER, None)  # not for the processes that this one starts
    if launcher is not None:
        threading.Thread(target=_wait_for_end_of, args=[int(launcher)], name="evodsp parent", daemon=True).start()


def _wait_for_end_of(parent: int) -> None:
    """Poll until this process has another parent: a process whose parent has died is adopted."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    tell(f"evodsp: error: the launcher (pid {parent}) is gone; this rank is ended")
    os._exit(GIVEN_UP)
