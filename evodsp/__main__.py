"""`python -m evodsp` is `evodsp`."""

from __future__ import annotations

import os
import sys
import threading

from evodsp.cli import main


def leave(code: int) -> None:
    """End the process with `code`.

    A rank that failed may still have a daemon thread in a call of torch's store. Taking it down with the interpreter would now
    and then abort the process (SIGABRT), and the code would be lost.
    """
    if code and any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
