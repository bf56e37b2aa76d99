"""Where a training step makes the host wait for the GPU, with Lightning's loop, loggers and callbacks around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KEYS = "_to_copy model/dropout.py"
"""The copy of dropout's keys, from pinned memory on a GPU; a meta tensor's source is never pinned."""
ROOT = Path(__file__).resolve().parents[2]


def test_a_step_waits_once(chains: Path, tmp_path: Path) -> None:
    """Catches losses, a norm or a sample number read one by one, numbers that are copied to the device to be logged, a check of
    a value on the device, and Lightning's question before each batch of several ranks whether one of them got SIGTERM.

    The one wait is the copy of all losses and of the norm in `TrainingModule.on_before_optimizer_step`. Batches are compared
    over the ranks before they are on the device, and are copied there asynchronously. So are the keys of dropout, once a pass.
    """
    program = [sys.executable, "-m", "tests.builders.host_waits_program", str(chains), str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    steps = [line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("WAITS ")]
    assert [ranks for ranks, _ in steps] == ["1", "1", "2", "2"], done.stderr
    for ranks, waits in ((ranks, json.loads(waits)) for ranks, waits in steps):
        places = [wait.split(":")[0] for wait in waits]
        assert [place for place in places if place != KEYS] == ["_to_copy training/module.py"], ranks
