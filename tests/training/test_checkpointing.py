"""Checkpoints that a killed run leaves behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.training.checkpoints import WholeFileIO
from evodsp.training.run_folder import RunFolder, damage


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
    assert {path.name for path in folder.iterdir()} <= {"last.ckpt", "last-1.ckpt", "best.ckpt"}
    assert not list((tmp_path / "run").glob(".curve*"))


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
    for place in range(8 * directory, 8 * len(whole), 3):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        if damage(path) is None:
            harmless += 1
            assert {name: tensor.tolist() for name, tensor in torch.load(path).items()} == expected, place
    assert 0 < harmless < 8 * (len(whole) - directory) / 3


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
