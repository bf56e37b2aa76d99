"""Rows of the logs are means over the steps since the row before, wherever the run was interrupted."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch import Trainer

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.report.runs import read_curve
from evodsp.training.config import TrainingConfig
from evodsp.training.gradients import Gradients, Reduced
from evodsp.training.logs import MEASURED, LogRows
from evodsp.training.module import TrainedBatch, TrainingModule

STEPS, EVERY, STOPPED = 6, 3, 4

Rows = dict[int, dict[str, float]]


def rows(output: Path) -> Rows:
    """The curve's columns of training that are functions of the settings."""
    found = {}
    for step, row in read_curve(output / "curve.csv").items():
        found[step] = {n: float(v) for n, v in row.items() if n.startswith("train/") and n not in MEASURED}
    return found


@pytest.fixture(scope="module")
def runs(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """A run of six steps with a row for each, one with a row for three, and the latter, interrupted within a row's steps."""
    folder = tmp_path_factory.mktemp("interval")

    def run(name: str, every: int, steps: int, *options: str) -> None:
        words = ["fit", f"--config={chains}/tiny.yaml", f"--output={folder / name}", f"--trainer.max_steps={steps}"]
        words += [f"--trainer.log_every_n_steps={every}", "--trainer.limit_val_batches=0", "--data.train.recycles=2"]
        assert main([*words, *options]) == 0

    run("each", 1, STEPS)
    run("third", EVERY, STEPS)
    run("parts", EVERY, STOPPED)
    run("parts", EVERY, STEPS, "--ckpt_path=last")
    return {name: rows(folder / name) for name in ("each", "third", "parts")}


@pytest.mark.verify
def test_a_row_is_the_mean_of_its_steps(runs: dict[str, Rows]) -> None:
    """A row that shows its last step only, or goes on with the sums of the row before."""
    each, third = runs["each"], runs["third"]
    assert list(each) == list(range(STEPS))
    assert list(third) == [EVERY - 1, STEPS - 1]
    assert {"train/loss", "train/lddt_ca", "train/gradient_norm", "train/clipped_fraction", "train/recycles"} < set(
        each[0]
    )
    assert len({row["train/recycles"] for row in each.values()}) > 1
    for last, row in third.items():
        steps = [each[step] for step in range(last - EVERY + 1, last + 1)]
        for name, value in row.items():
            expected = steps[-1][name] if name == "train/lr" else sum(step[name] for step in steps) / EVERY
            assert value == pytest.approx(expected, rel=1e-6), name


def test_a_row_does_not_depend_on_an_interruption(runs: dict[str, Rows]) -> None:
    """Sums that are not in the checkpoint: the first row after a resume would lack the steps before it."""
    assert runs["parts"] == runs["third"]


def test_a_number_that_some_steps_lack() -> None:
    """A loss term that a resumed run adds, divided by the steps of the others."""
    rows = LogRows()
    rows.add_step({"a": 1.0})
    resumed = LogRows()
    resumed.load_state_dict(rows.state_dict())
    resumed.add_step({"a": 2.0, "b": 3.0})
    resumed.end_interval()
    assert resumed.last == {"a": 1.5, "b": 3.0}
    assert resumed.means() == {}


def test_the_numbers_of_a_step_are_means_over_the_passes_that_count() -> None:
    """Catches a norm or a share of clipped gradients that is divided by the passes of the step, or not weighted by those that
    count, and numbers of a pass that is left out."""
    module = TrainingModule(TrainingConfig(**vars(ModelConfig.preset("test"))))
    trainer = MagicMock(spec=Trainer)
    trainer.log_every_n_steps, trainer.global_step = 10, 0
    module.trainer, module.log = trainer, MagicMock()  # type: ignore[method-assign]
    norm, counted, clipped = torch.tensor(6.0), torch.tensor([True, False, True]), torch.tensor(0.5)
    module._gradients = MagicMock(spec=Gradients, drops_samples=True)
    module._gradients.finish.return_value = Reduced(norm, counted, clipped)
    module._gradients.not_finite.return_value = []
    numbers = [{"loss": torch.tensor(loss), "fape": torch.tensor(fape)} for loss, fape in LOSSES]
    module._passes = [TrainedBatch(*one) for one in zip(numbers, [[0], [1], [2]], [0, 1, 5], strict=True)]
    module.on_before_optimizer_step(MagicMock(spec=torch.optim.Optimizer))
    assert module.rows.means() == {
        "loss": 3.0, "fape": 1.0, "gradient_norm": 6.0, "clipped_fraction": 0.5, "recycles": 2.0
    }  # fmt: skip


LOSSES = ((1.0, 0.5), (float("nan"), 100.0), (5.0, 1.5))
"""Of three passes, of which the second one is left out."""
