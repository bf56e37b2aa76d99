"""Callbacks that send their process a signal in the middle of a step, as an administrator or a batch system would."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.launch.environment import STOPPED_FILE

STEP = 2
"""The step in which the signal comes."""


class Terminate(Callback):
    number = signal.SIGTERM

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == STEP and self.is_here():
            os.kill(os.getpid(), self.number)

    def is_here(self) -> bool:
        return True


class TerminateTwice(Terminate):
    def is_here(self) -> bool:
        os.kill(os.getpid(), self.number)
        return True


class User(Terminate):
    number = signal.SIGUSR1


class Interrupt(Terminate):
    number = signal.SIGINT


class TerminateStep(Terminate):
    """Rank 0 sends it to all processes that the batch script has started: torchrun, the ranks, their workers."""

    def is_here(self) -> bool:
        if os.environ["RANK"] == "0":
            mark = f"{STOPPED_FILE}={os.environ[STOPPED_FILE]}".encode()
            for file in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):
                    if mark in file.read_bytes().split(b"\0"):
                        os.kill(int(file.parent.name), self.number)
        return False


class UserStep(TerminateStep):
    number = signal.SIGUSR1


class TerminateRank1(Terminate):
    def is_here(self) -> bool:
        return os.environ["RANK"] == "1"


class TerminateInValidation(Callback):
    """In the first batch of each validation that comes after step `STEP`. Says how many batches were scored."""

    def __init__(self) -> None:
        self.scored = 0

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.scored += not trainer.sanity_checking
        if trainer.global_step >= STEP and os.environ.get("RANK", "1") == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        print(f"scored {self.scored}")
