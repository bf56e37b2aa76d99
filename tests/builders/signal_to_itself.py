"""Callbacks that send their process a signal in the middle of a step, as an administrator or a batch system would."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

STEP = 2
"""The step in which the signal comes."""


class Terminate(Callback):
    number = signal.SIGTERM

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == STEP and self.is_here():
            os.kill(os.getpid(), self.number)

    def is_here(self) -> bool:
        return True


class User(Terminate):
    number = signal.SIGUSR1


class Interrupt(Terminate):
    number = signal.SIGINT


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
