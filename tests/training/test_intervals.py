"""When checkpoints are written, and which are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from evodsp.cli import main
from evodsp.training.checkpoints import BestCheckpoint, LastCheckpoint, WholeFileIO
from evodsp.training.run_folder import RunFolder, rename_callbacks
from tests.builders.training import CommandPool

NO_OTHERS = ("--checkpoint_every=null", "--trainer.limit_val_batches=0")


def words(chains: Path, output: Path, *options: str) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", *NO_OTHERS, *options]


def steps(output: Path) -> dict[str, int]:
    """The step of each file."""
    return {
        path.stem: torch.load(path, weights_only=True)["global_step"]
        for path in (output / "checkpoints").glob("*.ckpt")
    }


@pytest.mark.verify
def test_an_interval_in_samples(chains: Path, tmp_path: Path) -> None:
    """Samples taken for steps, or counted without the accumulated batches; a write within a step."""
    options = ("--checkpoint_every_samples=7", "--trainer.accumulate_grad_batches=3", "--data.samples_per_epoch=15")
    assert main(words(chains, tmp_path / "run", "--trainer.max_steps=5", "--keep_last=9", *options)) == 0
    assert steps(tmp_path / "run") == {"last": 5, "last-1": 4, "last-2": 2}


def test_a_checkpoint_holds_the_validation_of_its_step(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a file that is written before the validation of its step: a run killed during the validation resumes after it,
    without the row of the curve and without the best score."""
    written: list[tuple[int, bool]] = []

    def note(self: WholeFileIO, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).name == "last.ckpt":
            score = checkpoint["callbacks"]["BestCheckpoint"]["best_model_score"]
            written.append((checkpoint["global_step"], score is not None))

    monkeypatch.setattr(WholeFileIO, "save_checkpoint", note)
    options = (
        "--checkpoint_every=1",
        "--data.samples_per_epoch=2",
        "--trainer.max_steps=3",
        "--async_checkpoints=false",
    )
    assert main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path / 'run'}", *options]) == 0
    assert written == [(1, False), (2, True), (3, True)]


@pytest.mark.verify_but("option1")
@pytest.mark.parametrize("option", [[], ["--async_checkpoints=true"], ["--async_checkpoints=false"]])
def test_who_writes_the_checkpoints(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    """Catches a setting that is ignored: steps that wait for the disk, or a thread where the user wants none."""
    writers: list[bool] = []
    save = WholeFileIO.save_checkpoint

    def note(self: WholeFileIO, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        writers.append(threading.current_thread() is threading.main_thread())
        save(self, checkpoint, path)

    monkeypatch.setattr(WholeFileIO, "save_checkpoint", note)
    assert main(words(chains, tmp_path / "run", "--checkpoint_every_samples=1", "--trainer.max_steps=2", *option)) == 0
    assert writers == [option == ["--async_checkpoints=false"]] * 2
    assert steps(tmp_path / "run")["last"] == 2


@contextmanager
def rank_1_asks() -> Iterator[None]:
    with mock.patch.object(LastCheckpoint, "asked", property(lambda self: os.environ["RANK"] == "1")):
        yield


@pytest.mark.verify
def test_an_interval_in_minutes_on_two_ranks(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """Ranks whose clocks differ: one that saves alone hangs."""
    options = ("--parallel.sequence=2", "--keep_last=2", "--trainer.max_steps=3")
    outcomes = commands.evodsp(2, *words(chains, tmp_path / "run", *options), around=rank_1_asks)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert steps(tmp_path / "run") == {"last": 3, "last-1": 2}


def fake_trainer(folder: RunFolder) -> Any:
    """What the callbacks ask of a trainer, which writes its step only."""
    trainer = MagicMock(spec=Trainer)
    io = WholeFileIO(folder.former)
    trainer.strategy = SimpleNamespace(checkpoint_io=io, reduce_boolean_decision=bool)
    trainer.state, trainer.accumulate_grad_batches, trainer.global_step = SimpleNamespace(fn="fit"), 2, 0
    trainer.num_val_batches = []
    trainer.fast_dev_run, trainer.sanity_checking, trainer.loggers = False, False, []
    trainer.save_checkpoint = lambda path, weights_only: io.save_checkpoint({"global_step": trainer.global_step}, path)
    return trainer


def test_a_request_is_met_at_the_end_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write between two accumulated batches, one for each of them, one that all ranks were not asked for, and a time that
    is not counted from the last write."""
    folder, now = RunFolder(tmp_path), [1000.0]
    monkeypatch.setattr("evodsp.training.checkpoints.time.monotonic", lambda: now[0])
    trainer = fake_trainer(folder)
    trainer.accumulate_grad_batches = 3
    last, written = LastCheckpoint(folder.last, seconds=90.0), []
    for batch in range(12):
        now[0] += 20
        trainer.global_step = (batch + 1) // 3
        if last.asked:
            last.agree()
        last.on_train_batch_end(trainer, MagicMock(spec=LightningModule), None, None, batch)
        written.append(last.saved_step)
    assert written == [None] * 5 + [2] * 6 + [4]
    assert not last.asked


@pytest.mark.parametrize(
    ("intervals", "expected"), [((500, 3), [3, 6, 9]), ((4, 6), [4, 6, 8]), ((500,), []), ((), [])], ids=str
)
def test_intervals_in_steps(tmp_path: Path, intervals: tuple[int, ...], expected: list[int]) -> None:
    """Catches a second interval that is ignored, or a step that has to be a multiple of both."""
    folder = RunFolder(tmp_path)
    trainer = fake_trainer(folder)
    trainer.accumulate_grad_batches = 1
    last, written = LastCheckpoint(folder.last, intervals), []
    for batch in range(10):
        trainer.global_step, before = batch + 1, last.saved_step
        last.on_train_batch_end(trainer, MagicMock(spec=LightningModule), None, None, batch)
        written += [last.saved_step] if last.saved_step != before else []
    assert written == expected


def test_the_best_are_kept_by_their_score(tmp_path: Path) -> None:
    """Files shifted by age, a place that is off by one, nan taken for a best, or scores that no longer belong to the files."""
    folder = RunFolder(tmp_path, keep_best=3)
    trainer = fake_trainer(folder)
    best = BestCheckpoint(folder.checkpoints, 3)
    for step, score in enumerate((float("nan"), 0.3, 0.5, 0.4, 0.2, 0.6, 0.4)):
        trainer.global_step = step
        current = torch.tensor(score)
        if best.check_monitor_top_k(trainer, current):
            best._update_best_and_save(current, trainer, {})
    assert steps(tmp_path) == {"best": 5, "best-1": 2, "best-2": 3}
    assert {Path(path).stem: round(float(score), 1) for path, score in best.best_k_models.items()} == {
        "best": 0.6,
        "best-1": 0.5,
        "best-2": 0.4,
    }
    assert best.best_model_path == str(folder.checkpoints / "best.ckpt")
    fewer = BestCheckpoint(folder.checkpoints, 1)
    fewer.load_state_dict(best.state_dict())
    fewer._update_best_and_save(torch.tensor(0.55), trainer, {})
    assert steps(tmp_path)["best"] == 5


def test_scores_of_earlier_versions_are_known() -> None:
    """best.ckpt overwritten by a worse one, because the resumed run forgot its score."""
    name = "ModelCheckpoint{'monitor': 'val/lddt_ca', 'mode': 'max', 'every_n_train_steps': 0, 'every_n_epochs': 1, 'train_time_interval': None}"  # noqa: E501
    old, new = {"callbacks": {name: 1}}, {"callbacks": {name: 1, "BestCheckpoint": 2}}
    rename_callbacks(old)
    rename_callbacks(new)
    assert old == {"callbacks": {"BestCheckpoint": 1}}
    assert new["callbacks"]["BestCheckpoint"] == 2


def test_a_folder_reached_through_a_link(tmp_path: Path) -> None:
    """Lightning resolves links: earlier versions are not kept, as the name is another one."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    folder = RunFolder(tmp_path / "link", keep_last=2)
    assert folder.former(tmp_path / "disk/checkpoints/last.ckpt") == [tmp_path / "disk/checkpoints/last-1.ckpt"]
