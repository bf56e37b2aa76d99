"""The curve, its rows and their means; loggers of the user; the progress of a run in a terminal and in a log file."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.report.runs import RESUMED, read_curve
from evodsp.training import logs
from evodsp.training.config import TrainingConfig
from evodsp.training.gradients import Gradients, Reduced
from evodsp.training.logs import CurveLogger, LogRows, TrainingProgress
from evodsp.training.module import TrainedBatch, TrainingModule
from evodsp.training.trainer import hush


def logged(folder: Path, steps: list[int]) -> None:
    logger = CurveLogger(folder)
    for step in steps:
        logger.log_metrics({"train/loss": step / 2}, step)
    logger.finalize("success")


def test_metrics_of_one_step_share_a_row_and_late_columns_fit(tmp_path: Path) -> None:
    """Validation metrics appear later than training's: a header written once loses them."""
    logger = CurveLogger(tmp_path)
    logger.log_metrics({"train/loss": 2.0, "epoch": 0}, 0)
    logger.save()
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.log_metrics({"val/lddt_ca": 0.5}, 1)
    logger.save()
    rows = read_curve(tmp_path / "curve.csv")
    assert {k: v for k, v in rows[1].items() if k != "seconds"} == {
        "step": "1",
        "train/loss": "1",
        "val/lddt_ca": "0.5",
    }
    assert rows[0]["epoch"] == "0"


def test_a_resumed_run_continues_its_curve_without_doubled_steps(tmp_path: Path) -> None:
    """Lightning's CSVLogger deletes the earlier part."""
    logged(tmp_path, [0, 1, 2, 3])
    logged(tmp_path, [2, 3, 4])
    assert list(read_curve(tmp_path / "curve.csv")) == [0, 1, 2, 3, 4]
    assert not list(tmp_path.glob(".curve*"))


def test_a_step_that_is_made_again_has_none_of_its_former_values(tmp_path: Path) -> None:
    """Catches a validation of a step that was undone, in the row of the step that took its place."""
    for values in ({"train/loss": 1.0, "val/lddt_ca": 0.5}, {"train/loss": 2.0}):
        logger = CurveLogger(tmp_path)
        logger.log_metrics(values, 2)
        logger.finalize("success")
    assert [name for name in read_curve(tmp_path / "curve.csv")[2] if name.startswith("val/")] == []


def test_a_fresh_run_replaces_the_curve(tmp_path: Path) -> None:
    logged(tmp_path, [0, 1, 2, 3])
    logged(tmp_path, [0, 1])
    assert list(read_curve(tmp_path / "curve.csv")) == [0, 1]


def test_rows_are_appended(tmp_path: Path) -> None:
    """A run of a million rows that rewrites all of them with each; validation, which is logged later, in a row of its own."""
    logger = CurveLogger(tmp_path)
    path = tmp_path / "curve.csv"

    def log(step: int, metrics: dict[str, float]) -> int:
        logger.log_metrics(metrics, step)
        logger.save()
        return path.stat().st_ino  # a rewritten file is another one

    log(0, {"train/loss": 1.0, "val/loss": 2.0})
    files = [log(1, {"train/loss": 3.0}), log(1, {"val/loss": 4.0}), log(2, {"train/loss": 5.0})]
    assert len(set(files)) == 1
    assert len(path.read_text().splitlines()) == 4
    assert log(3, {"train/loss": 6.0, "new": 1.0}) not in files
    log(4, {"train/loss": 0.125})
    log(4, {"train/loss": 7.0})  # a shorter row in place of a longer one
    log(2, {"val/loss": 8.0})
    rows = read_curve(path)
    assert [row.get("train/loss") for row in rows.values()] == ["1", "3", "5", "6", "7"]
    assert {step: row["val/loss"] for step, row in rows.items() if "val/loss" in row} == {0: "2", 1: "4", 2: "8"}
    assert len(path.read_text().splitlines()) == 6


def test_a_curve_that_a_full_disk_cut_short(tmp_path: Path) -> None:
    """A number of which the first digits are there, taken for the number; a run that goes on behind half a row."""
    logged(tmp_path, [0, 1, 2])
    path = tmp_path / "curve.csv"
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_curve(path)) == [0, 1]
    logged(tmp_path, [3])
    assert [row["train/loss"] for row in read_curve(path).values()] == ["0", "0.5", "1.5"]


def test_a_curve_that_somebody_changes(tmp_path: Path) -> None:
    """Rows written at the place where the file used to end; a run that ends because its file is gone."""
    logger = CurveLogger(tmp_path)
    path = tmp_path / "curve.csv"
    for step in range(5):
        logger.log_metrics({"train/loss": step / 2}, step)
        logger.save()
        if step == 1:
            path.write_text(path.read_text().replace("0.5", "0.500"))
        if step == 3:
            path.unlink()
    assert {step: float(row["train/loss"]) for step, row in read_curve(path).items()} == {4: 2.0}


def test_a_resumed_start_is_marked_once(tmp_path: Path) -> None:
    """Catches a resume that the curve does not tell, one in each row, the mark of a first start, and a mark that outlives the
    rows behind it."""
    for first, steps in ((0, (0, 1, 2, 3)), (2, (3, 5)), (4, (5, 7)), (2, (3, 4))):
        logger = CurveLogger(tmp_path)
        logger.first_step = first
        for step in steps:
            logger.log_metrics({"train/loss": 1.0}, step)
            logger.save()
        marks = {step: row[RESUMED] for step, row in read_curve(tmp_path / "curve.csv").items() if RESUMED in row}
        assert marks == {0: {}, 2: {3: "2"}, 4: {3: "2", 5: "4"}}[first] or (steps == (3, 4) and marks == {3: "2"})


def test_a_number_that_some_steps_lack() -> None:
    """A loss term that a resumed run adds, divided by the steps of the others."""
    training_rows = LogRows()
    training_rows.add_step({"a": 1.0})
    resumed = LogRows()
    resumed.load_state_dict(training_rows.state_dict())
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


FIXED = "tests.builders.observers.FixedRunLogger"


def words(chains: Path, output: Path, *options: str, steps: int = 2) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", f"--trainer.max_steps={steps}",
            "--trainer.limit_val_batches=0", *options]  # fmt: skip


def recorded(path: Path) -> list[tuple[str, Any]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


@pytest.mark.verify
def test_a_logger_that_refuses_changed_settings(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that cannot be resumed with another learning rate because its MLflow run has a fixed id; the settings of the first
    start for ever in TensorBoard."""
    option = f"--trainer.logger={{class_path: {FIXED}, init_args: {{file: {tmp_path}/record}}}}"
    assert main(words(chains, tmp_path / "run", option)) == 0
    capsys.readouterr()
    assert main(words(chains, tmp_path / "run", option, "--ckpt_path=last", "--model.optimizer.lr=0.001", steps=3)) == 0
    line = "FixedRunLogger keeps the settings of an earlier start: INVALID_PARAMETER_VALUE: Changing param values is"
    assert capsys.readouterr().err.count(line) == 1
    assert [kind for kind, _ in recorded(tmp_path / "record")].count("settings") == 1
    assert list(read_curve(tmp_path / "run/curve.csv")) == [0, 1, 2]
    settings = yaml.safe_load((tmp_path / "run/tensorboard/hparams.yaml").read_text())
    assert (settings["trainer"]["max_steps"], settings["model"]["optimizer"]["lr"]) == (3, 0.001)


def test_the_table_of_a_profiler_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Catches `trainer.profiler: simple` that measures a whole run and shows nothing: Lightning is silenced."""
    hush()
    logger = logging.getLogger(SimpleProfiler.__mro__[1].__module__)
    logger.addHandler(caplog.handler)
    try:
        profiler = SimpleProfiler()
        with profiler.profile("a step"):
            pass
        profiler.describe()
    finally:
        logger.removeHandler(caplog.handler)
    assert "Profiler Report" in caplog.text
    assert "a step" in caplog.text


@pytest.mark.verify
def test_weights_and_biases_offline(chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    output = tmp_path / "run"
    option = "--trainer.logger={class_path: WandbLogger, init_args: {offline: true, save_dir: SAVE}}"
    assert main(words(chains, output, option.replace("SAVE", str(tmp_path)))) == 0
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert list(read_curve(output / "curve.csv")) == [0, 1]


@pytest.mark.verify
def test_mlflow_in_files(chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want a data base
    output, uri = tmp_path / "run", f"file:{tmp_path}/mlruns"
    option = f"--trainer.logger={{class_path: MLFlowLogger, init_args: {{tracking_uri: '{uri}'}}}}"
    assert main(words(chains, output, option)) == 0
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.data.params["model/optimizer/lr"] == "0.01"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [0, 1]
    assert list(read_curve(output / "curve.csv")) == [0, 1]


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
