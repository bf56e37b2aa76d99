"""The progress of a training run in a log file."""

from __future__ import annotations

import io
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from evodsp.training import logs
from evodsp.training.logs import TrainingProgress


def test_a_log_file_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace of a resumed run taken from the steps of earlier starts too: it would promise to end at once."""
    now = 1000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    metrics = {"train/loss": torch.tensor(2.5), "train/samples_per_second": torch.tensor(0.4)}
    trainer = mock.Mock(
        spec=Trainer, global_step=900, estimated_stepping_batches=1000, callback_metrics=metrics, callbacks=[]
    )
    written = io.StringIO()
    shown = TrainingProgress(Console(file=written))
    module = LightningModule()
    shown.on_train_start(trainer, module)
    for step, seconds in ((900, 30.0), (901, 5.0), (910, 65.0)):
        trainer.global_step, now = step, now + seconds
        shown.on_train_batch_end(trainer, module)
    assert written.getvalue().splitlines() == [
        "0 parameters, from step 900 to 1000",
        "step 900/1000  30 s  loss 2.500  samples/s 0.400",
        "step 910/1000  100 s, 15 min left  loss 2.500  samples/s 0.400",
    ]
