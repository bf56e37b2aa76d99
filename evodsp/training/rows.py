"""Hands each row of the logs to the loggers before a checkpoint of its step is written.

Lightning does so after all callbacks, the checkpoints among them. A run that is killed in between would resume behind the row,
and the learning curve would lack it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.training.csv_logger import CurveLogger


class LoggedRows(Callback):
    """Collects the numbers of a row during its step, and logs them at the end of the step."""

    def __init__(self) -> None:
        self._row: dict[str, float] = {}

    def add(self, numbers: Mapping[str, float]) -> None:
        """More numbers of the row that belongs to the running step."""
        self._row.update(numbers)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CurveLogger):
                logger.first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._row:
            row, self._row = {**self._row, "epoch": float(trainer.current_epoch)}, {}
            for logger in trainer.loggers:
                logger.log_metrics(row, trainer.global_step - 1)
                logger.save()
