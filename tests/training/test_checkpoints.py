"""Checkpoint files: when and by whom they are written, which are kept, and what a kill, a full disk or a lost bit leaves."""

from __future__ import annotations

import datetime
import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.report.runs import read_curve
from evodsp.training.checkpoints import BesideTheSteps, BestCheckpoint, LastCheckpoint, WholeFileIO, use_checkpoint_io
from evodsp.training.run_folder import RunFolder, damage, rename_callbacks
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.training import CommandPool, fit


class Unwritable:
    """What cannot be saved."""

    def __reduce__(self) -> Any:
        raise OSError("no space left on device")


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    """A full disk, or a kill, in the middle of a write over the only checkpoint."""
    path, write = tmp_path / "checkpoints" / "last.ckpt", WholeFileIO().save_checkpoint
    write({"step": 1, "weights": torch.ones(3)}, path)
    with pytest.raises(OSError, match="no space"):
        write({"step": 2, "weights": torch.ones(3), "more": Unwritable()}, path)
    assert torch.load(path)["step"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_only_unfinished_files_are_deleted(tmp_path: Path) -> None:
    RunFolder(tmp_path / "absent").prepare("", replace=False)
    (tmp_path / "checkpoints").mkdir()
    for name in (
        "checkpoints/last.ckpt",
        "checkpoints/.last.ckpt.7.partial",
        "curve.csv",
        ".curve.7.partial",
        "a.partial",
    ):
        (tmp_path / name).touch()
    RunFolder(tmp_path).prepare("", replace=False)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"checkpoints/last.ckpt", "curve.csv", "a.partial", "config.yaml", "absent/config.yaml"}


def _checkpoints(folder: Path, keep: int, steps: int) -> RunFolder:
    run = RunFolder(folder, keep)
    for step in range(steps):
        WholeFileIO(run.former).save_checkpoint({"step": step, "weights": torch.randn(500)}, run.last)
    return run


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    """Versions in the wrong order, one more or one less than asked for, or another file's versions moved."""
    run = _checkpoints(tmp_path, keep=3, steps=5)
    found = {path.name: torch.load(path)["step"] for path in run.checkpoints.iterdir()}
    assert found == {"last.ckpt": 4, "last-1.ckpt": 3, "last-2.ckpt": 2}
    assert run.former(run.checkpoints / "best.ckpt") == []


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """A file cut short by a crash, a bit that a disk has lost in the weights (which loads without an error), or both files."""
    run = _checkpoints(tmp_path, keep=2, steps=2)
    data = bytearray(run.last.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    run.last.write_bytes(data if how == "flipped" else data[: len(data) - 50] if how == "truncated" else b"")
    assert run.newest_intact() == run.checkpoints / "last-1.ckpt"
    said = capsys.readouterr().err
    assert f"{run.last} is damaged" in said
    assert "going on from" in said
    (run.checkpoints / "last-1.ckpt").write_bytes(b"PK")
    with pytest.raises(UserError, match="and there is no other"):
        run.newest_intact()


def test_a_bit_lost_anywhere_is_found_or_harmless(tmp_path: Path) -> None:
    """Bits of the archive's directory, which has no checksum: a traceback while the file is checked or read, in place of the
    checkpoint before; an entry that is read as if it were empty."""
    path = tmp_path / "last.ckpt"
    torch.save({f"weight {number}": torch.randn(3) for number in range(3)}, path)
    whole = path.read_bytes()
    expected = {name: tensor.tolist() for name, tensor in torch.load(path).items()}
    directory = whole.index(b"PK\x01\x02")
    harmless = 0
    for place in range(8 * directory, 8 * len(whole), 5):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        if damage(path) is None:
            harmless += 1
            assert {name: tensor.tolist() for name, tensor in torch.load(path).items()} == expected, place
    assert 0 < harmless < 8 * (len(whole) - directory) / 5


@pytest.mark.verify_but("full")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO], ids=["full", "limit of sizes", "broken"])
def test_a_full_disk_is_one_line(
    code: int, chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback, or half a checkpoint."""

    def full(number: int) -> None:
        if "checkpoints" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("evodsp.training.checkpoints.os.fsync", full)
    words = ["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path}/run", "--trainer.max_steps=1"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == (
        f"evodsp: error: --output {tmp_path}/run: {os.strerror(code)}; make room there, or give another --output"
    )
    assert "Traceback" not in error
    assert not list((tmp_path / "run").rglob("*.ckpt*"))


class Held(TorchCheckpointIO):
    """Begins to write when it is let go, and notes how many writes there are at a time."""

    def __init__(self) -> None:
        self.go, self.running, self.most = threading.Event(), 0, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.go.wait(60)
        torch.save(checkpoint, path)
        self.running -= 1


class Kept(TorchCheckpointIO):
    """A user's plugin."""


def test_what_is_written_is_the_state_of_the_save(tmp_path: Path) -> None:
    """A copy by reference: the file holds weights of the next step beside this step's counts, and resumes into nonsense. Or
    tensors that were one, and are saved twice."""
    held = Held()
    io = BesideTheSteps(held)
    weights, counts = torch.zeros(5, requires_grad=True), {"step": 1, "list": [1]}
    io.save_checkpoint({"raw": weights, "average": weights, "loops": counts}, tmp_path / "a.ckpt")
    with torch.no_grad():
        weights += 1
    counts["step"] = 2
    counts["list"].append(2)  # type: ignore[attr-defined]
    held.go.set()
    found = io.load_checkpoint(tmp_path / "a.ckpt")
    assert found["loops"] == {"step": 1, "list": [1]}
    torch.testing.assert_close(found["raw"], torch.zeros(5))
    assert found["raw"].data_ptr() == found["average"].data_ptr()
    assert not found["raw"].requires_grad


def test_one_write_at_a_time(tmp_path: Path) -> None:
    """A disk slower than the saves: one copy of the state after another fills the memory; or the older one is written last."""
    held = Held()
    io = BesideTheSteps(held)
    io.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    threading.Timer(0.2, held.go.set).start()
    io.save_checkpoint({"step": 2}, tmp_path / "a.ckpt")
    assert held.most == 1
    assert (tmp_path / "a.ckpt").is_file()
    io.teardown()
    assert torch.load(tmp_path / "a.ckpt") == {"step": 2}


def test_an_error_of_the_thread_is_raised_once(tmp_path: Path) -> None:
    """A run that trains for days and saves nothing; an error that is raised again while the run ends because of it."""

    class Full(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            raise OSError("no space")

    io = BesideTheSteps(Full())
    for ask in (io.check, io.wait, lambda: io.save_checkpoint({}, tmp_path / "b"), io.teardown):
        io.save_checkpoint({}, tmp_path / "a")
        time.sleep(0.1)
        with pytest.raises(OSError, match="no space"):
            ask()
        io.check()
        io.teardown()


@pytest.mark.parametrize("beside", [True, False])
def test_a_users_checkpoint_plugin_is_kept(tmp_path: Path, beside: bool) -> None:
    """One that uploads, encrypts or shards, replaced without a word."""

    def io(*plugins: CheckpointIO) -> Any:
        trainer = Trainer(plugins=list(plugins), logger=False, accelerator="cpu", default_root_dir=tmp_path)
        use_checkpoint_io(trainer, lambda path: (), beside)
        return trainer.strategy.checkpoint_io

    assert isinstance(io(), BesideTheSteps if beside else WholeFileIO)
    assert isinstance(io(Kept()), Kept)
    assert isinstance(io(AsyncCheckpointIO(Kept())).checkpoint_io, Kept)
    assert isinstance(io(AsyncCheckpointIO()).checkpoint_io, WholeFileIO)


def test_a_run_ends_after_its_last_write(chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends, or a lock that is given back, while the thread still writes."""
    fsync = os.fsync

    def slow(number: int) -> None:
        time.sleep(0.5)
        fsync(number)

    monkeypatch.setattr("evodsp.training.checkpoints.os.fsync", slow)
    output = tmp_path / "run"
    assert fit(chains, output, "--trainer.max_steps=1", "--trainer.limit_val_batches=0") == 0
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_failed_write_ends_the_run_at_the_next_step(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that is noticed only at the next save, hours later."""

    def broken(number: int) -> None:
        if "checkpoints" in os.readlink(f"/proc/self/fd/{number}"):
            raise PermissionError(13, "Permission denied", str(tmp_path / "run/checkpoints/last.ckpt"))

    monkeypatch.setattr("evodsp.training.checkpoints.os.fsync", broken)
    options = ("--trainer.max_steps=200", "--data.samples_per_epoch=200", "--checkpoint_every=2")
    with monkeypatch.context() as patch:
        patch.setattr("evodsp.training.checkpoints.LastCheckpoint._save", save_once())
        assert fit(chains, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"evodsp: error: --output {tmp_path}/run: ")
    assert "Permission denied" in error
    assert max(read_curve(tmp_path / "run/curve.csv")) < 100


def save_once() -> Any:
    """`LastCheckpoint._save` that saves the first time only."""
    from evodsp.training.checkpoints import LastCheckpoint

    save, done = LastCheckpoint._save, list[int]()

    def once(self: LastCheckpoint, trainer: Trainer) -> None:
        if not done:
            done.append(trainer.global_step)
            save(self, trainer)

    return once


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


@pytest.mark.verify
def test_a_state_that_is_refused_is_read_once_its_class_is_allowed(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches days of training behind a message whose way out leads nowhere."""

    def fit(*options: str) -> int:
        remembers = "--trainer.callbacks=tests.builders.observers.Remembers"
        return main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path / 'run'}", remembers, *options])

    assert fit("--trainer.max_steps=1") == 0
    assert fit("--trainer.max_steps=2", "--ckpt_path=last") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "it holds datetime.date, which evodsp does not read" in said
    assert "torch.serialization.add_safe_globals" in said
    with torch.serialization.safe_globals([datetime.date]):
        assert fit("--trainer.max_steps=2", "--ckpt_path=last") == 0


def test_a_file_that_is_refused_is_not_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps lost: a whole file is called damaged, and the run goes on from an older one. Or a lost bit is not noticed any
    more."""
    run = RunFolder(tmp_path, keep_last=2)
    run.checkpoints.mkdir()
    torch.save({"step": 1}, run.checkpoints / "last-1.ckpt")
    torch.save({"step": 2, "weights": torch.randn(100), "when": datetime.date(2026, 11, 25)}, run.last)
    for read in (run.newest_intact, lambda: read_checkpoint(run.last)):
        with pytest.raises(UserError, match=r"holds datetime\.date.*add_safe_globals") as caught:
            read()
        assert "damaged" not in str(caught.value)
    data = bytearray(run.last.read_bytes())
    data[len(data) // 2] ^= 4
    run.last.write_bytes(data)
    assert run.newest_intact() == run.checkpoints / "last-1.ckpt"
    assert "is damaged" in capsys.readouterr().err
