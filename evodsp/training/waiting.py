"""How much of a training step is spent waiting for samples."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.training.datamodule import ChainDataModule


class WaitingTime(Callback):
    """Logs `train/waiting_percent`: the share of the time since the last logged step in which the training process waited for
    samples, its own or those of other ranks. If it is far above zero, more workers make training faster.
    """

    def __init__(self, data: ChainDataModule) -> None:
        self._data = data
        self._begun, self._waited = 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun, self._waited = time.perf_counter(), self._data.waited_s

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and every and trainer.global_step % every == 0:
            now, waited = time.perf_counter(), self._data.waited_s
            share = 100 * (waited - self._waited) / max(now - self._begun, 1e-9)
            pl_module.log("train/waiting_percent", torch.tensor(share))
            self._begun, self._waited = now, waited
