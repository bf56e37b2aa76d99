"""Ask a run to stop again and again: `python -m tests.builders.repeated_signals KIND TIMES FOLDER` prints what went wrong.

Each time several SIGTERMs come at random moments, before, while and after the run saves. KIND `rank`: `evodsp fit` on one rank.
`launcher`: the launcher, with two ranks that only save. Each run is a fork of this process, so that nothing is imported twice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import lightning.pytorch  # noqa: F401
import torch

import evodsp.training.command  # noqa: F401
from evodsp.__main__ import leave
from evodsp.cli import main
from evodsp.launch import launcher
from tests.builders.small_run import PATIENCE_S, losses, words, write_config

SIGNALS, LONGEST_S = 4, 0.5
"""How many signals come, and the longest time between two."""

SAVES = """
import signal, sys, time
from evodsp.launch.environment import end_with_launcher
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.2)
    open(sys.argv[1], "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
end_with_launcher()
open(sys.argv[1] + ".begun", "w").close()
time.sleep(1000)
"""


def rank(folder: Path) -> NoReturn:
    """A training run that goes on until it is asked to stop."""
    config = write_config(folder / "run.yaml")
    options = ("--parallel.sequence=1", "--data.num_workers=0", "--trainer.limit_val_batches=0")
    sys.argv = ["evodsp", *words(config, folder / "run", *options, steps=100_000)]
    leave(main())


def launched(folder: Path) -> NoReturn:
    """The launcher, with ranks that save for a second when they are asked to stop."""
    start, numbers = subprocess.Popen, iter(range(2))

    def saving(_: list[str], **options: object) -> subprocess.Popen[bytes]:
        saved = folder / f"saved_{next(numbers)}"
        return start([sys.executable, "-c", SAVES, str(saved)], **options)  # type: ignore[call-overload, no-any-return]

    launcher.subprocess.Popen = saving  # type: ignore[assignment, misc]
    leave(launcher.launch(2, []))


def begun(kind: str, folder: Path) -> bool:
    """Whether the run can be asked to stop."""
    if kind == "rank":
        return bool(losses(folder / "run"))
    return all((folder / f"saved_{number}.begun").exists() for number in range(2))


def saved(kind: str, folder: Path) -> bool:
    """Whether the run has saved."""
    names = ["run/checkpoints/last.ckpt"] if kind == "rank" else ["saved_0", "saved_1"]
    return all((folder / name).exists() for name in names)


def volley(kind: str, folder: Path, draws: random.Random) -> str:
    """What went wrong with one run, or nothing."""
    folder.mkdir()
    run: Callable[[Path], NoReturn] = rank if kind == "rank" else launched
    pid = os.fork()
    if pid == 0:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run(folder)
    deadline = time.monotonic() + PATIENCE_S
    ended = 0
    while not begun(kind, folder) and not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(pid, os.WNOHANG)
    for _ in range(SIGNALS):
        if not ended:
            os.kill(pid, signal.SIGTERM)
            time.sleep(draws.uniform(0, LONGEST_S))
            ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(pid, os.WNOHANG)
    said = (folder / "output").read_text()
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"it has not ended: {said}"
    code = os.waitstatus_to_exitcode(status)
    if code != 75 or not saved(kind, folder) or "Traceback" in said:
        return f"exit code {code}, saved: {saved(kind, folder)}: {said}"
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, times, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    draws = random.Random(7)
    wrong = [said for number in range(times) if (said := volley(kind, folder / f"{kind}_{number}", draws))]
    print(*wrong, f"{times} runs, {len(wrong)} wrong", sep="\n")
    sys.exit(bool(wrong))
