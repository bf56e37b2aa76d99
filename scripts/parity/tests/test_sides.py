"""Comparisons with DeepMind's code and with DockQ: a planted difference fails the run. They themselves need these programs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from scripts.parity import complex_msas, confidence, dockq


@pytest.mark.parametrize(("by", "code"), [(0.0, 0), (1e-4, 1), (np.nan, 1)])
def test_a_difference_of_confidence_is_found(monkeypatch: pytest.MonkeyPatch, by: float, code: int) -> None:
    """Catches a score that is not compared, NaN that counts as equal, and a difference that does not fail the run."""
    theirs = {name: value.copy() for name, value in confidence.ours_of(confidence.draw(seed=0)).items()}
    theirs["pair_iptm"][1, 2] += by
    monkeypatch.setattr(confidence, "deepminds_side", lambda *_: theirs)
    assert confidence.main(["--alphafold", "python"]) == code


@pytest.mark.parametrize(("by", "code"), [(0.0, 0), (1e-3, 1), (np.nan, 1)])
def test_a_difference_of_dockq_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: float, code: int) -> None:
    """Catches a score that is not compared, an interface that one side lacks, and a complex without exchanged copies."""
    dockq.write(0, tmp_path)
    theirs = dict(dockq.ours_of(tmp_path))
    assert theirs["mapping"].tolist() == list(dockq.EXCHANGED)
    assert 0.1 < theirs["dockq"].min() < theirs["dockq"].max() < 0.99
    theirs["ligand_rmsd"] = theirs["ligand_rmsd"] + by * (np.arange(len(theirs["dockq"])) == 1)
    monkeypatch.setattr(dockq, "other_side", lambda *_: theirs)
    assert dockq.main(["--dockq", "python"]) == code
    monkeypatch.setattr(dockq, "other_side", lambda *_: {name: value[:-1] for name, value in theirs.items()})
    assert dockq.main(["--dockq", "python"]) == 1


@pytest.mark.parametrize(
    ("quantity", "by", "code"), [("msa_feat", 1e-7, 0), ("msa_feat", 1e-4, 1), ("extra_msa", 1, 1)]
)
def test_a_difference_of_msas_is_found(monkeypatch: pytest.MonkeyPatch, quantity: str, by: float, code: int) -> None:
    """Catches a quantity or a pass that is not compared, and a difference that does not fail the run."""
    one = next(case for case in complex_msas.cases(seed=0) if case.name == "A, B, B")
    monkeypatch.setattr(complex_msas, "cases", lambda _: [one])
    theirs = one.compared(0)[0]
    theirs[f"{quantity}|A, B, B, pass 2"].flat[0] += by
    monkeypatch.setattr(complex_msas, "deepminds_side", lambda *_: theirs)
    assert complex_msas.main(["--alphafold", "python"]) == code


@pytest.mark.parametrize(("program", "option"), [(confidence, "--alphafold"), (dockq, "--dockq")])
def test_without_the_package_nothing_is_compared(
    program: ModuleType, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches success, or a traceback, where the other program is not installed."""
    assert program.main([option, sys.executable]) == 2
    message = capsys.readouterr().err
    assert "has no package" in message
    assert message.count("\n") == 1
