"""The progress of a training run in a log file."""

from __future__ import annotations

import io
import re
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from evodsp.training import logs
from evodsp.training.logs import TrainingProgress


@pytest.mark.parametrize(("width", "end"), [(80, "lDDT-CA 0.020"), (160, "samples/s 1.168")])
def test_a_narrow_terminal_shows_steps_and_times(width: int, end: str) -> None:
    """Catches a terminal of 80 columns in which the last step and the time left are cut, and a bar is not."""
    numbers = {"train/loss": 56.463, "train/lddt_ca": 0.02, "train/samples_per_second": 1.168, "val/lddt_ca": 0.5}
    metrics = {name: torch.tensor(value) for name, value in numbers.items()}
    trainer = mock.Mock(
        spec=Trainer, global_step=17000, estimated_stepping_batches=78125, callback_metrics=metrics, callbacks=[]
    )
    written = io.StringIO()
    console, module = Console(file=written, force_terminal=True, width=width, color_system=None), LightningModule()
    shown = TrainingProgress(console)
    shown.on_train_start(trainer, module)
    shown.on_train_batch_end(trainer, module)
    shown.on_train_end(trainer, module)
    line = next(line for line in reversed(written.getvalue().splitlines()) if "step" in line)
    assert re.search(r"step 17000/78125 .*0:00:00 left -:--:-- loss 56.463  lDDT-CA 0.020", line)
    assert line.endswith(end)
    assert ("━" in line) == (width > 100)


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
