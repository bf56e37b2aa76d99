"""Runs on a real file system that is full, or becomes read-only: one line, the earlier checkpoint, and a run that goes on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from evodsp.report.runs import read_curve
from evodsp.training.run_folder import damage
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.processes import begin
from tests.builders.small_run import PATIENCE_S, assert_nothing_partial, evodsp, words, write_config

STEPS = 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB in memory, which only root may mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "evodsp-test", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is refused: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    """All but a part of a checkpoint. A run that saves meanwhile may take some of it."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with suppress(OSError), (disk / "ballast").open("wb") as file:
        file.write(b"\0" * (free - 150_000))


def write_protect(disk: Path, protected: bool = True) -> None:
    """Put a read-only view of the folder over it, or take it away. The folder itself cannot be remounted: run.lock is open."""
    if not protected:
        subprocess.run(["umount", disk], check=True)
        return
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run(
        ["mount", "-o", "remount,ro,bind", disk], check=False
    ).returncode:  # a file is being written there
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "mend", "said"),
    [
        pytest.param(fill, lambda disk: (disk / "ballast").unlink(), "No space left on device", id="full"),
        pytest.param(write_protect, lambda disk: write_protect(disk, False), "Read-only file system", id="read-only"),
    ],
)
def test_a_run_on_a_spoilt_disk(
    disk: Path,
    tmp_path: Path,
    ranks: int,
    spoil: Callable[[Path], None],
    mend: Callable[[Path], None],
    said: str,
) -> None:
    """A traceback, a run that trains on without saving or hangs, half a checkpoint in place of a whole one; weights that differ
    after the resume."""
    output, options = disk / "run", (f"--parallel.sequence={ranks}", "--trainer.limit_val_batches=0")
    config = write_config(tmp_path / "run.yaml")
    process = begin(evodsp(*words(config, output, *options, steps=10_000)))
    last, deadline = output / "checkpoints/last.ckpt", time.monotonic() + PATIENCE_S
    while not last.is_file():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not come that far"
        time.sleep(0.01)
    spoil(disk)
    _, error = process.communicate(timeout=PATIENCE_S)
    print(error)
    assert process.returncode == 2, error
    errors = [line for line in error.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, error
    assert errors[0].startswith(f"evodsp: error: --output {output}: ")
    assert said in errors[0]
    assert "Traceback" not in error
    assert damage(last) is None
    mend(disk)
    reached = read_checkpoint(last)["global_step"]
    whole, steps = tmp_path / "whole", max(STEPS, reached + 2)
    for folder, more in ((output, ["--ckpt_path=last"]), (whole, [])):
        resumed = begin(evodsp(*words(config, folder, *options, *more, steps=steps)))
        _, error = resumed.communicate(timeout=PATIENCE_S)
        assert resumed.returncode == 0, error
    assert_nothing_partial(output)
    one, other = (read_checkpoint(folder / "checkpoints/last.ckpt") for folder in (output, whole))
    assert one["global_step"] == other["global_step"] == steps
    for kind in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
    assert list(read_curve(output / "curve.csv")) == list(range(steps))
