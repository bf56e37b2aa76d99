"""The batch scripts that `evodsp slurm` writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from evodsp.cli import main
from tests.builders.processes import ROOT

SLURM = ROOT / "scripts" / "examples" / "slurm"


def test_the_scripts_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a script that is not written, that sbatch's users cannot start, or that a second call refuses."""
    for _ in range(2):
        assert main(["slurm", "--output", str(tmp_path / "scripts")]) == 0
    names = ["build.sbatch", "fit.sbatch", "README.md"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "scripts" / name) for name in names] * 2
    for name in names:
        written = tmp_path / "scripts" / name
        assert written.read_bytes() == (SLURM / name).read_bytes()
        assert os.access(written, os.X_OK) == name.endswith(".sbatch")
        named = re.findall(r"scripts/examples/slurm/|\]\((?!https:)\S+", written.read_text())
        assert named == [], "which a reader without a clone does not have"


def test_a_changed_script_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a user's settings that are lost because the command was given again."""
    (tmp_path / "fit.sbatch").write_text("mine")
    assert main(["slurm", "--output", str(tmp_path)]) == 2
    assert "fit.sbatch: has another content than the fit.sbatch of this evodsp" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["fit.sbatch"]
    assert main(["slurm", "--output", str(tmp_path), "--overwrite", "true"]) == 0
    assert (tmp_path / "fit.sbatch").read_text() != "mine"
