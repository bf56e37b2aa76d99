"""`python -m evodsp` is `evodsp`."""

from __future__ import annotations

import os
import sys
import threading

from evodsp.cli import main


def leave(code: int) -> None:
    """End the process with `code`.

    A rank that failed may still have a daemon thread inside a call to torch's store. Ending that thread with the interpreter
    sometimes aborts the process (SIGABRT), which would change the exit code.
    """
    if code and any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
