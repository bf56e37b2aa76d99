"""Checkpoints that a killed run leaves behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.training.checkpointing import WholeFileIO
from evodsp.training.run_folder import RunFolder


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


def test_a_run_writes_checkpoints_in_place(chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's way, by the folder of temporary files, which may be on another disk, or full."""
    words = [
        "fit",
        "--config",
        str(chains / "tiny.yaml"),
        "--output",
        str(tmp_path / "run"),
        "--trainer.max_steps",
        "1",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
        assert main(words) == 0
    folder = tmp_path / "run" / "checkpoints"
    (folder / ".last.ckpt.123.partial").touch()
    (tmp_path / "run" / ".curve.csv.123.partial").touch()
    assert main([*words[:-1], "2", "--ckpt_path", "auto"]) == 0
    assert {path.name for path in folder.iterdir()} <= {"last.ckpt", "best.ckpt"}
    assert not list((tmp_path / "run").glob(".curve*"))


def test_only_unfinished_files_are_deleted(tmp_path: Path) -> None:
    RunFolder(tmp_path / "absent").remove_partial()
    (tmp_path / "checkpoints").mkdir()
    for name in (
        "checkpoints/last.ckpt",
        "checkpoints/.last.ckpt.7.partial",
        "curve.csv",
        ".curve.7.partial",
        "a.partial",
    ):
        (tmp_path / name).touch()
    RunFolder(tmp_path).remove_partial()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"checkpoints/last.ckpt", "curve.csv", "a.partial"}
