"""Every run writes its curve and TensorBoard's files; loggers of the user come on top, and all get the settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.profilers import SimpleProfiler

from evodsp.cli import main
from evodsp.report.runs import read_curve
from evodsp.training.trainer import hush

RECORDING = "tests.builders.recording_logger.RecordingLogger"
FIXED = "tests.builders.recording_logger.FixedRunLogger"


def words(chains: Path, output: Path, *options: str, steps: int = 2) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", f"--trainer.max_steps={steps}",
            "--trainer.limit_val_batches=0", *options]  # fmt: skip


def recorded(path: Path) -> list[tuple[str, Any]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def test_a_users_logger_is_added(chains: Path, tmp_path: Path) -> None:
    """No curve.csv as soon as somebody wants Weights & Biases too; a logger that never hears of the settings."""
    output, record = tmp_path / "run", tmp_path / "record"
    option = f"--trainer.logger={{class_path: {RECORDING}, init_args: {{file: {record}}}}}"
    assert main(words(chains, output, option)) == 0
    calls = recorded(record)
    assert [kind for kind, _ in calls] == ["settings", "metrics", "metrics", "end"]
    settings = calls[0][1]
    assert settings["model"]["optimizer"]["lr"] == 1e-2
    assert settings == yaml.safe_load((output / "config.yaml").read_text())
    curve = read_curve(output / "curve.csv")
    for _, metrics in calls[1:3]:
        row = curve[metrics.pop("step")]
        assert {name: float(cell) for name, cell in row.items() if name not in ("step", "seconds")} == pytest.approx(
            metrics
        )
    hparams = yaml.safe_load((output / "tensorboard" / "hparams.yaml").read_text())
    assert hparams["data"]["train"]["crop_size"] == 10
    assert list((output / "tensorboard").glob("events.*"))


def test_a_run_without_loggers(chains: Path, tmp_path: Path) -> None:
    """`logger: false`, and files of loggers that nobody wants."""
    assert main(words(chains, tmp_path / "none", "--trainer.logger=false", steps=1)) == 0
    assert {path.name for path in (tmp_path / "none").iterdir()} == {"checkpoints", "config.yaml"}


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


def test_a_logger_that_cannot_be_made(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback of the parser's types where a logger cannot be made, alone or in a list."""
    made = f"{{class_path: {RECORDING}, init_args: {{file: ''}}}}"
    for option in (f"--trainer.logger={made}", f"--trainer.logger=[{made}]"):
        assert main(words(chains, tmp_path / "run", option)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"'{RECORDING}': no module named 'records'" in said


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
