"""What decides the result of `scripts.parity.dockq`. The comparison itself needs DockQ's program."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.parity import dockq


@pytest.mark.parametrize(("by", "code"), [(0.0, 0), (1e-3, 1), (np.nan, 1)])
def test_a_difference_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, by: float, code: int
) -> None:
    """Catches a score that is not compared, NaN that counts as equal, and a complex whose copies nobody has to exchange."""
    dockq.write(0, tmp_path)
    theirs = dict(dockq.ours_of(tmp_path))
    assert theirs["mapping"].tolist() == list(dockq.EXCHANGED)
    assert 0.1 < theirs["dockq"].min() < theirs["dockq"].max() < 0.99
    theirs["ligand_rmsd"] = theirs["ligand_rmsd"] + by * (np.arange(len(theirs["dockq"])) == 1)
    monkeypatch.setattr(dockq, "other_side", lambda *_: theirs)
    assert dockq.main(["--dockq", "python"]) == code
    assert f"{len(theirs)} quantities" in capsys.readouterr().out


def test_another_number_of_interfaces_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches scores that are compared although one side lacks an interface."""
    dockq.write(0, tmp_path)
    theirs = {name: value[:-1] for name, value in dockq.ours_of(tmp_path).items()}
    monkeypatch.setattr(dockq, "other_side", lambda *_: theirs)
    assert dockq.main(["--dockq", "python"]) == 1


def test_without_the_package_nothing_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches success, or a traceback, where the program is not installed."""
    assert dockq.main(["--dockq", str(Path(sys.executable))]) == 2
    message = capsys.readouterr().err
    assert "has no package DockQ" in message
    assert message.count("\n") == 1
