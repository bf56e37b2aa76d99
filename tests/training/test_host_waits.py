"""Where a training step makes the host wait for the GPU, with Lightning's loop, loggers and callbacks around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 2
"""Waits that a step may have; it has one."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_waits_once(chains: Path, tmp_path: Path, ranks: int) -> None:
    """Catches losses, a norm or a sample number read one by one, numbers that are copied to the device to be logged, a check of
    a value on the device, and Lightning's question before each batch of several ranks whether one of them got SIGTERM.

    The one wait is the copy of all losses and of the norm in `TrainingModule.on_before_optimizer_step`. Batches are compared
    over the ranks before they are on the device, and are copied there asynchronously.
    """
    program = [sys.executable, "-m", "tests.builders.host_waits_program", str(ranks), str(chains), str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    steps = [json.loads(line.removeprefix("WAITS ")) for line in done.stdout.splitlines() if line.startswith("WAITS ")]
    assert len(steps) == 2, done.stderr
    for waits in steps:
        assert len(waits) <= MOST, waits
        assert [wait.split(":")[0] for wait in waits] == ["_to_copy training/module.py"]
