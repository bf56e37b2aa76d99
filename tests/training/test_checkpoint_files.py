"""Checkpoints written beside the steps: the copy, the thread's errors, and what a user brings along."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO

from evodsp.cli import main
from evodsp.report.runs import read_curve
from evodsp.training.checkpoints import BesideTheSteps, WholeFileIO, use_checkpoint_io
from evodsp.weights.checkpoint import read_checkpoint


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


def fit(chains: Path, output: Path, *options: str) -> int:
    return main(["fit", f"--config={chains}/tiny.yaml", f"--output={output}", *options])


def test_a_run_with_plugins_and_callbacks_of_a_user(chains: Path, tmp_path: Path) -> None:
    """A user's ModelCheckpoint that collides with ours, or is left out; a last checkpoint that does not know the best score,
    after which a resumed run overwrites best.ckpt with a worse one."""
    output, own = tmp_path / "run", tmp_path / "own"
    callback = "--trainer.callbacks"
    options = [
        f"{callback}=lightning.pytorch.callbacks.ModelCheckpoint", f"{callback}.dirpath={own}", f"{callback}.mode=max",
        f"{callback}.monitor=val/lddt_ca", "--trainer.plugins=lightning.pytorch.plugins.AsyncCheckpointIO",
    ]  # fmt: skip
    assert fit(chains, output, "--trainer.max_steps=2", "--data.samples_per_epoch=2", *options) == 0
    assert len(list(own.glob("*.ckpt"))) == 1
    score = float(read_curve(output / "curve.csv")[1]["val/lddt_ca"])
    last = read_checkpoint(output / "checkpoints/last.ckpt")
    assert float(last["callbacks"]["BestCheckpoint"]["best_model_score"]) == pytest.approx(score, abs=1e-6)
    assert read_checkpoint(output / "checkpoints/best.ckpt")["global_step"] == 2


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
