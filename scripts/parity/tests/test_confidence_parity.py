"""What decides the result of `scripts.parity.confidence`. The comparison itself needs DeepMind's JAX code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.parity import confidence


@pytest.mark.parametrize(("by", "code"), [(0.0, 0), (1e-4, 1), (np.nan, 1)])
def test_a_difference_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: float, code: int
) -> None:
    """Catches a score that is not compared, NaN that counts as equal, and a difference that does not fail the run."""
    theirs = {name: value.copy() for name, value in confidence.ours_of(confidence.draw(seed=0)).items()}
    theirs["pair_iptm"][1, 2] += by
    monkeypatch.setattr(confidence, "deepminds_side", lambda *_: theirs)
    assert confidence.main(["--alphafold", "python"]) == code
    assert f"{len(theirs)} quantities" in capsys.readouterr().out


def test_without_the_package_nothing_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches success, or a traceback, where DeepMind's package is not installed."""
    assert confidence.main(["--alphafold", str(Path(sys.executable))]) == 2
    message = capsys.readouterr().err
    assert "has no package alphafold" in message
    assert message.count("\n") == 1
