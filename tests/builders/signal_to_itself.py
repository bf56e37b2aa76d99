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
