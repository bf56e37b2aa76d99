"""`scripts/benchmarks/rehearse.sh`, with a stand-in for Python: which steps it runs, and what it says of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "benchmarks" / "rehearse.sh"
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>{log}
case "$*" in
  *gpu_graphs*) echo the first line; echo the reason; exit 3 ;;
  *pytest*) [[ $PYTHONPATH == {numpy}:* ]] ;;
  *) [[ $PYTHONPATH != *{numpy}* ]] ;;
esac
"""


def rehearse(folder: Path, *steps: str) -> tuple[int, list[str], list[str]]:
    """Exit code, lines, and the commands that Python was given."""
    log, numpy, python = folder / "log", folder / "for_triton", folder / "python"
    (numpy / "numpy").mkdir(parents=True, exist_ok=True)
    log.write_text("")
    python.write_text(STAND_IN.replace("{log}", shlex.quote(str(log))).replace("{numpy}", shlex.quote(str(numpy))))
    python.chmod(0o755)
    environment = {**os.environ, "EVODSP_PYTHON": str(python), "NUMPY_FOR_TRITON": str(numpy)}
    done = subprocess.run(["bash", SCRIPT, *steps], capture_output=True, text=True, check=False, env=environment)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines(), log.read_text().splitlines()


def test_a_step_that_fails_is_listed_and_the_others_run(tmp_path: Path) -> None:
    """Catches a failure that ends the rehearsal, hides its output or is forgotten in the exit code, and the wrong NumPy."""
    code, lines, commands = rehearse(tmp_path)
    verdicts = [re.sub(r": .*, \d+ s$", "", line) for line in lines if not line.startswith(" ")]
    names = (
        "measurements",
        "graphs",
        "compiling",
        "host",
        "ahead",
        "verification",
        "kernels",
        "training",
        "prediction",
    )
    assert verdicts == [f"{'FAILED' if name == 'graphs' else 'ok':7} {name}" for name in names]
    assert [line.strip() for line in lines if line.startswith(" ")] == ["the first line", "the reason"]
    assert code == 1
    assert len(commands) == 1 + len(names)  # the first asks whether torch is there


def test_every_package_is_pinned() -> None:
    """Catches a version that changes by itself, and one that differs from what a kit brings."""
    pins = (ROOT / "scripts" / "benchmarks" / "rehearsal_requirements.txt").read_text().splitlines()
    pins = [line for line in pins if not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    kit = (ROOT / "scripts" / "benchmarks" / "kit.sh").read_text()
    packed = re.search(r"^packages=\((.*?)\)", kit, re.MULTILINE | re.DOTALL)
    assert packed
    assert set(packed[1].split()) <= set(pins)
