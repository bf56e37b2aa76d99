"""`python -m evodsp` is `evodsp`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from evodsp.cli import main
from evodsp.launch.environment import STOPPED
from evodsp.printing import escape_others


def run() -> NoReturn:
    """The command `evodsp`."""
    escape_others()
    leave(main())


def leave(code: int) -> NoReturn:
    """End the process with `code`, which a usual exit of the interpreter would change in two cases.

    It removes signal handlers first, so another request to stop would kill a run that has already saved. And a failed rank
    may have a daemon thread inside a call to torch's store; ending that thread sometimes aborts the process (SIGABRT).
    """
    if code == STOPPED:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    if code and any(thread.daemon for thread in threading.enumerate()):
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # `main` has printed the message
                stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
