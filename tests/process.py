"""How every process of the tests is set up, also the ranks that tests start: import it before evodsp.

Every test checks the shapes in signatures at run time (`tests/shapes.py`), and computes with one thread.
"""

from __future__ import annotations

import gc
import os
import signal

from tests.shapes import install

# Imports take a quarter less without the garbage collector, which finds little in them. Who has imported all starts it.
gc.disable()
gc.set_threshold(10 * gc.get_threshold()[0])

# Started in the background of a script, this process ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # or every program that a test starts compiles the package again: a second
install(["evodsp", "scripts.paper.transformer", "scripts.paper.methods"])

import torch  # noqa: E402  (it reads the number of threads when it is imported)

torch.set_num_threads(1)
