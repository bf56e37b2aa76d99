"""The story of a run: one that nothing stops, and the same run in four parts, with what both leave in their folders."""

from __future__ import annotations

import csv
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import yaml

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.files import holder, lock
from evodsp.inference.score.table import columns_of
from evodsp.report.runs import RESUMED, read_curve
from evodsp.training.checks import CheckedRun, check_run
from evodsp.training.command import Built, TrainingCLI, _execute
from evodsp.training.logs import MEASURED
from evodsp.weights.checkpoint import load_features, load_model, read_checkpoint
from tests.builders.signal_to_itself import STEP
from tests.builders.training import NO_VALIDATION, Outcome, fit, told, words

LOGGER = "tests.builders.observers.RecordingLogger"
EVERY = 3
"""Steps of a row in the run of parts."""


@dataclass(frozen=True)
class Story:
    """Folders of the two runs, of six steps and four to an epoch, and what their starts said."""

    whole: Path
    said: str
    record: Path
    """What a user's logger was given."""
    parts: Path
    stopped: Outcome
    state: dict[str, Any]
    """Of the folder and the process after the first start of the run of parts."""
    own: Path
    """The folder of a user's own checkpoints."""


@pytest.fixture(scope="module")
def story(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The parts end in a signal within an epoch, after the epoch, in the next one, and after the six steps, twice within the
    steps of a row; the last of them has a callback and a plugin of the user."""
    folder = tmp_path_factory.mktemp("story")
    whole, parts, own = folder / "whole", folder / "parts", folder / "own"
    logger = f"--trainer.logger={{class_path: {LOGGER}, init_args: {{file: {folder}/record}}}}"
    done = told(words(chains, whole, logger))
    assert done.code == 0, done
    every = f"--trainer.log_every_n_steps={EVERY}"
    terminate = "--trainer.callbacks=tests.builders.signal_to_itself.TerminateTwice"
    with _a_signal_when_all_is_saved() as late, mock.patch.object(tempfile, "tempdir", str(folder / "absent")):
        before = _handlers()
        stopped = told(words(chains, parts, every, "--checkpoint_every=100", terminate))
        state = {"late": list(late), "same handlers": _handlers() == before}
    state |= {"lock": (parts / "run.lock").exists(), "last": read_checkpoint(parts / "checkpoints/last.ckpt")}
    (parts / "checkpoints/.last.ckpt.123.partial").touch()
    (parts / ".curve.csv.123.partial").touch()
    callback = "--trainer.callbacks"
    users = (
        f"{callback}=lightning.pytorch.callbacks.ModelCheckpoint", f"{callback}.dirpath={own}", f"{callback}.mode=max",
        f"{callback}.monitor=val/lddt_ca", "--trainer.plugins=lightning.pytorch.plugins.AsyncCheckpointIO",
    )  # fmt: skip
    for options in (("auto", "--trainer.max_steps=4"), ("auto", "--trainer.max_steps=5"), ("last", *users)):
        assert fit(chains, parts, every, f"--ckpt_path={options[0]}", *options[1:]) == 0
    return Story(whole, done.out, folder / "record", parts, stopped, state, own)


@contextmanager
def _a_signal_when_all_is_saved() -> Iterator[list[int]]:
    """SIGTERM before the command has given its exit code; the signals that then still reach this process."""
    late: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: late.append(number))
    try:
        with mock.patch("evodsp.training.command.tell_stopped", partial(signal.raise_signal, signal.SIGTERM)):
            yield late
    finally:
        signal.signal(signal.SIGTERM, former)


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]


def losses(output: Path) -> dict[int, str]:
    return {step: row["train/loss"] for step, row in read_curve(output / "curve.csv").items()}


def of_training(output: Path) -> dict[int, dict[str, float]]:
    """The curve's columns of training that are functions of the settings."""
    found = {}
    for step, row in read_curve(output / "curve.csv").items():
        numbers = {n: float(v) for n, v in row.items() if n.startswith("train/") and n not in MEASURED}
        found |= {step: numbers} if numbers else {}
    return found


def test_a_run_leaves_checkpoints_logs_and_its_config(story: Story) -> None:
    whole = story.whole
    names = {path.relative_to(whole).as_posix().split("/events")[0] for path in whole.rglob("*") if path.is_file()}
    checkpoints = {"checkpoints/last.ckpt", "checkpoints/best.ckpt"}
    assert checkpoints | {"curve.csv", "config.yaml", "tensorboard", "baseline.json"} <= names
    columns = {
        "train/loss",
        "train/backbone_fape",
        "train/lr",
        "val/lddt_ca",
        "val/lddt_ca/1abc_A",
        "val/tm_score",
        "seconds",
    }
    assert columns <= set(read_curve(whole / "curve.csv")[3])


def test_a_users_logger_is_added(story: Story) -> None:
    """No curve.csv as soon as somebody wants Weights & Biases too; a logger that never hears of the settings."""
    calls = [json.loads(line) for line in story.record.read_text().splitlines()]
    assert (calls[0][0], calls[-1][0]) == ("settings", "end")
    settings = calls[0][1]
    assert settings["model"]["optimizer"]["lr"] == 1e-2
    assert settings == yaml.safe_load((story.whole / "config.yaml").read_text())
    curve, logged = read_curve(story.whole / "curve.csv"), dict[int, dict[str, float]]()
    for _, metrics in calls[1:-1]:
        logged.setdefault(metrics.pop("step"), {}).update(metrics)
    assert logged.keys() == curve.keys() == set(range(6))
    for step, row in curve.items():
        found = {name: float(cell) for name, cell in row.items() if name not in ("step", "seconds")}
        assert found == pytest.approx(logged[step], nan_ok=True), step
    hparams = yaml.safe_load((story.whole / "tensorboard" / "hparams.yaml").read_text())
    assert hparams["data"]["train"]["crop_size"] == 10
    assert list((story.whole / "tensorboard").glob("events.*"))


def test_a_resumed_run_is_the_uninterrupted_run(story: Story) -> None:
    """Sample order, dropout, Adam's state, schedule or average lost in a resume within an epoch, at its end, or in the next; a
    row that shows its last step only, goes on with the sums of the row before, or lacks the steps before a resume."""
    each, third = of_training(story.whole), of_training(story.parts)
    assert list(each) == list(range(6))
    assert list(third) == [2, 5]
    assert {"train/gradient_norm", "train/clipped_fraction", "train/recycles"} < set(each[0])
    assert len({row["train/recycles"] for row in each.values()}) > 1
    for last, row in third.items():
        steps = [each[step] for step in range(last - EVERY + 1, last + 1)]
        for name, value in row.items():
            expected = steps[-1][name] if name == "train/lr" else sum(step[name] for step in steps) / EVERY
            assert value == pytest.approx(expected, rel=1e-6), name
    curves = [read_curve(folder / "curve.csv") for folder in (story.whole, story.parts)]
    scores = [{step: row["val/lddt_ca"] for step, row in curve.items() if "val/lddt_ca" in row} for curve in curves]
    assert scores[0].keys() == {3, 5}
    assert scores[1].pop(4), "the weights that the third start ended with"
    assert scores[0] == scores[1]
    assert {step: row[RESUMED] for step, row in curves[1].items() if RESUMED in row} == {3: "3", 4: "4", 5: "5"}
    once, twice = (read_checkpoint(folder / "checkpoints/last.ckpt") for folder in (story.whole, story.parts))
    assert once["global_step"] == twice["global_step"] == 6
    for weights in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(twice[weights][name], value) for name, value in once[weights].items())


def test_a_signal_stops_the_run_with_a_checkpoint(story: Story) -> None:
    """A pre-empted job that looks complete (exit code 0), steps that are lost or repeated, a handler that stays; and a further
    signal that ends the process when it has saved, before its exit code says so."""
    assert story.stopped.code == 75
    assert f"stopped by SIGTERM; the last checkpoint of step {STEP + 1} is {story.parts}" in story.stopped.error
    assert (story.state["late"], story.state["same handlers"], story.state["lock"]) == ([], True, False)
    assert story.state["last"]["global_step"] == STEP + 1


def test_checkpoints_are_written_in_place(story: Story) -> None:
    """Lightning's way, by the folder of temporary files, which may be on another disk, or full; unfinished files that stay."""
    names = {path.name for path in (story.parts / "checkpoints").iterdir()}
    assert names <= {"last.ckpt", "last-1.ckpt", "best.ckpt"}
    assert not list(story.parts.glob(".curve*"))


def test_plugins_and_callbacks_of_a_user(story: Story) -> None:
    """A user's ModelCheckpoint that collides with ours, or is left out; a last checkpoint that does not know the best score,
    after which a resumed run overwrites best.ckpt with a worse one."""
    assert len(list(story.own.glob("*.ckpt"))) == 1
    curve = read_curve(story.parts / "curve.csv")
    score, step = max((float(row["val/lddt_ca"]), -step) for step, row in curve.items() if "val/lddt_ca" in row)
    last = read_checkpoint(story.parts / "checkpoints/last.ckpt")
    assert float(last["callbacks"]["BestCheckpoint"]["best_model_score"]) == pytest.approx(score, abs=1e-6)
    assert read_checkpoint(story.parts / "checkpoints/best.ckpt")["global_step"] == 1 - step


@pytest.mark.verify
def test_a_checkpoint_between_validations_resumes_alike(chains: Path, story: Story, tmp_path: Path) -> None:
    """Lightning counts a batch as done only after the hook in which checkpoints are written."""
    output = tmp_path / "run"
    assert (
        fit(chains, output, "--checkpoint_every", "1", "--trainer.limit_val_batches", "0", "--trainer.max_steps", "3")
        == 0
    )
    other = tmp_path / "other"
    assert fit(chains, other, "--ckpt_path", str(output / "checkpoints" / "last.ckpt")) == 0
    assert losses(other) == {step: loss for step, loss in losses(story.whole).items() if step >= 3}


def test_the_checkpoint_holds_raw_and_averaged_weights(story: Story) -> None:
    path = story.whole / "checkpoints" / "last.ckpt"
    averaged, raw = load_model(path), load_model(path, raw=True)
    assert not averaged.training
    differing = [not torch.equal(a, b) for a, b in zip(averaged.parameters(), raw.parameters(), strict=True)]
    assert sum(differing) > len(differing) / 2


def test_the_checkpoint_holds_the_features_of_validation(story: Story) -> None:
    """The features of training, with crops and random recycling, or none: prediction would use other sizes."""
    expected = FeatureConfig(crop_size=None, msa_clusters=4, extra_msa=3, recycles=0, uniform_recycling=False)
    for name in ("last", "best"):
        assert load_features(story.whole / "checkpoints" / f"{name}.ckpt") == expected


def test_mixed_precision_trains(chains: Path, story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning refuses to clip gradients in mixed precision where the optimizer is fused; one launch per parameter and
    operation of Adam; a resume may switch to it."""
    output, last = tmp_path / "run", f"--ckpt_path={story.whole}/checkpoints/last.ckpt"
    mixed = (
        "--trainer.precision=bf16-mixed",
        "--trainer.callbacks=tests.builders.observers.ReportSetup",
        NO_VALIDATION,
    )
    for step, options in (
        (7, (last,)),
        (8, ("--ckpt_path=last", "--model.optimizer.clip=batch", "--trainer.gradient_clip_algorithm=norm")),
        (9, ("--ckpt_path=last", "--model.optimizer.clip=batch", "--trainer.gradient_clip_algorithm=value")),
    ):
        assert fit(chains, output, f"--trainer.max_steps={step}", *mixed, *options) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("SETUP ")]
        assert json.loads(line.removeprefix("SETUP "))["fused"] is True
    assert fit(chains, output, "--trainer.max_steps=10", "--ckpt_path=last", NO_VALIDATION) == 0
    assert list(losses(output)) == [6, 7, 8, 9]


def rows(text: str) -> list[str]:
    """The lines of a table of scores that are of a chain."""
    return [line for line in text.splitlines() if line.startswith("1abc_A")]


def test_validation_in_training_scores_the_average(
    chains: Path, story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw weights scored in training, the average by `validate`: their tables must agree."""
    in_training = rows(story.said)[-1:]
    for name in ("validate", "test"):
        assert main([name, *words(chains, story.whole, "--ckpt_path=last")[1:]]) == 0
        said, warned = capsys.readouterr()
        assert rows(said) == in_training
        assert "warning: 1 of 1 scored chains are trained on, such as 1abc_A: their scores" in warned
        assert said.splitlines()[-1] == f"scores: {story.whole / name}.csv"
        check_file(story.whole / f"{name}.csv", in_training, {"validate": "validation"}.get(name, name))


def check_file(path: Path, table: list[str], split: str) -> None:
    """The file has the columns of `evodsp score`, and the numbers of the table."""
    with path.open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == ["chain", *columns_of("chains")[1:]]
    assert [row[name] for name in ("chain", "split", "residues", "resolved")] == ["1abc_A", split, "13", "13"]
    names = ("lddt_ca", "gdt_ts", "tm_score", "rmsd", "plddt")
    assert [float(row[name]) for name in names] == pytest.approx([float(x) for x in table[0].split()[1:6]], abs=6e-4)


def test_files_that_nobody_wants(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of loggers that nobody wants; files named that do not exist; an earlier run that is replaced in part; a config that
    replaces its own run; config.yaml written to the current folder, over another one; filters that the user wrote and that are
    not applied, without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("mine")
    no_logger, no_checkpoints = "--trainer.logger=false", "--trainer.enable_checkpointing=false"

    def run(*options: str) -> tuple[set[str], str, str]:
        """Files of the run, the last line that it prints, and what it warns of."""
        assert fit(chains, Path("run"), "--trainer.max_steps=1", NO_VALIDATION, *options) == 0
        names = {path.relative_to("run").as_posix() for path in Path("run").rglob("*") if path.is_file()}
        said = capsys.readouterr()
        return names, said.out.splitlines()[-1], said.err

    names, last, _ = run(no_logger)
    assert (names, last) == ({"checkpoints/last.ckpt", "config.yaml"}, "checkpoint: run/checkpoints/last.ckpt")
    names, last, warned = run(no_logger, no_checkpoints, "--overwrite", "--data.filters.max_resolution=9")
    assert (names, last) == ({"config.yaml"}, "config: run/config.yaml")
    assert warned.count("evodsp: warning: data.filters are not applied: values that are all the default") == 1
    names, last, _ = run(no_checkpoints, "--overwrite")
    assert last == "curve: run/curve.csv"
    assert not any(name.startswith("checkpoints") for name in names)
    assert list(losses(Path("run"))) == [0]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "mine"
    Path("run/checkpoints").mkdir()
    Path("run/checkpoints/last.ckpt").touch()
    assert main(["fit", "--config=run/config.yaml"]) == 2
    assert "--ckpt_path last" in capsys.readouterr().err


def test_nothing_is_deleted_before_everything_is_checked(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite with a mistake in another option: the earlier run is gone and there is no new one."""
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    for mistake in ("--trainer.accelerator=abacus", "--data.train_chains=[1abc_B]", "--model.ema_decay=2"):
        assert fit(chains, tmp_path / "run", "--overwrite", mistake) == 2
        assert checkpoint.is_file()


@pytest.mark.verify
def test_a_run_without_work_is_refused(chains: Path, story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 without a step or a score; but a repeated `--ckpt_path auto` of a finished run is no mistake."""
    common = ["--config", str(chains / "tiny.yaml"), "--output", str(story.whole)]
    for command, options, said in (
        (
            "fit",
            ["--ckpt_path=last", "--trainer.max_steps=1"],
            "last.ckpt: is at step 6 already, and trainer.max_steps is 1",
        ),
        (
            "fit",
            ["--ckpt_path=last", "--trainer.max_steps=9", "--max_samples=6"],
            "last.ckpt: is at step 6 already, and max_samples is 6, so nothing is left to train; give a larger max_samples",
        ),
        ("validate", ["--ckpt_path=last", "--data.validation_chains=null"], "data.validation_chains is null"),
        (
            "test",
            ["--ckpt_path=last", "--data.validation_chains=null"],
            "data.test_chains and data.validation_chains are",
        ),
    ):
        assert main([command, *common, *options]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    settings = TrainingCLI("fit", [*common, "--ckpt_path=auto", "--trainer.max_steps=6"]).settings
    assert check_run("fit", settings).start == story.whole / "checkpoints" / "last.ckpt"


@pytest.mark.verify
def test_a_checkpoint_of_other_sizes_is_refused(
    chains: Path, story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wall of missing keys, weights silently left at random, or sizes that `validate` ignores."""
    options = ("--ckpt_path", str(story.whole / "checkpoints" / "last.ckpt"), "--model.evoformer.blocks", "2")
    for command in ("fit", "validate", "test"):
        common = ["--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run")]
        assert main([command, *common, *options]) == 2
        assert "trained with model.evoformer.blocks 1, but the config says 2" in capsys.readouterr().err


def test_a_folder_in_which_another_run_trains(tmp_path: Path) -> None:
    """Catches two runs that write the same checkpoints: the lock is not taken, or only after the folder was prepared."""
    run, built = MagicMock(spec=CheckedRun), MagicMock(spec=Built)
    run.command, run.start, run.changed, run.folder, run.chains = "fit", None, (), MagicMock(path=tmp_path), MagicMock()
    run.settings = MagicMock(run=MagicMock(init_from=None, dry_run=False))
    built.module, built.data, built.trainer, built.world = MagicMock(), MagicMock(), MagicMock(), MagicMock(group=None)
    with (
        lock(tmp_path / "run.lock", tmp_path, "trains there"),
        pytest.raises(UserError, match=f"process {os.getpid()} on .* trains there; end it first"),
    ):
        _execute(run, built, "")
    assert not run.folder.prepare.called

    def prepare(*_: object) -> None:
        assert holder(tmp_path / "run.lock") is not None
        raise KeyboardInterrupt

    run.folder.prepare.side_effect = prepare
    with pytest.raises(KeyboardInterrupt):
        _execute(run, built, "")


@pytest.mark.verify
def test_accumulated_batches_and_workers_run(chains: Path, tmp_path: Path) -> None:
    """One optimizer step of two batches of two, made by a worker process."""
    options = ("--trainer.accumulate_grad_batches", "2", "--data.batch_size", "2", "--data.num_workers", "1")
    assert fit(chains, tmp_path / "run", *options, "--trainer.max_steps", "1") == 0
