"""`python -m evodsp` is `evodsp`."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import threading
from typing import NoReturn

from evodsp.cli import main
from evodsp.launch.parent import STOPPED
from evodsp.printing import escape_others


def run() -> NoReturn:
    """The command `evodsp`."""
    escape_others()
    leave(main())


def leave(code: int) -> NoReturn:
    """End the process with `code`.

    At once, if that is safe: Python would take apart all modules first, those of PyTorch's compiler for a second. Where
    Lightning is loaded, loggers and callbacks of others may leave files for Python to close.

    And at once, if it failed: a rank that failed may still have a daemon thread inside a call to torch's store. Ending that
    thread with the interpreter sometimes aborts the process (SIGABRT), which would change the exit code.
    """
    if code == STOPPED:  # Python lets go of its handlers first: another request to stop would change the exit code
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if code and any(thread.daemon for thread in others):
        _end(code)
    if not others and "lightning" not in sys.modules:
        atexit._run_exitfuncs()
        _end(code)
    sys.exit(code)


def _end(code: int) -> NoReturn:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # Python removes this folder as well, where it ends by itself
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            continue  # its reader has read enough (`evodsp plan | head -1`), or `main` has closed it
        except OSError as error:
            os.write(2, f"evodsp: error: {stream.name} cannot be written ({error.strerror})\n".encode())
            code = code or 1
    os._exit(code)


if __name__ == "__main__":
    run()
