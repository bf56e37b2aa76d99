"""What decides the result of `scripts.parity.complex_msas`. The comparison itself needs DeepMind's JAX code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from evodsp.geometry.residues import MASK
from scripts.parity import complex_msas


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> complex_msas.Case:
    case = next(case for case in complex_msas.cases(seed=0) if case.name == "A, B, B")
    monkeypatch.setattr(complex_msas, "cases", lambda _: [case])
    return case


@pytest.mark.parametrize(
    ("quantity", "by", "code"), [("msa_feat", 1e-7, 0), ("msa_feat", 1e-4, 1), ("extra_msa", 1, 1)]
)
def test_a_difference_is_found(
    one_case: complex_msas.Case, monkeypatch: pytest.MonkeyPatch, quantity: str, by: float, code: int
) -> None:
    """Catches a quantity or a pass that is not compared, and a difference that does not fail the run."""
    theirs = one_case.compared(0)[0]
    theirs[f"{quantity}|A, B, B, pass 2"].flat[0] += by
    monkeypatch.setattr(complex_msas, "deepminds_side", lambda *_: theirs)
    assert complex_msas.main(["--alphafold", "python"]) == code


def test_the_distribution_of_hidden_letters_is_read() -> None:
    """Catches a grid that is not even: it would compare other probabilities than those that letters are drawn with."""
    profile = np.zeros((1, 22), np.float32)
    profile[0, 3] = 1
    found = complex_msas.probabilities_of(np.array([[5]], np.int8), profile, complex_msas.FeatureConfig())[0, 0]
    expected = np.full(23, 0.005)
    expected[[20, 21]] = 0
    expected[[3, 5, MASK]] += 0.1, 0.1, 0
    expected[MASK] = 0.7
    np.testing.assert_allclose(found, expected, atol=2 / complex_msas.STEPS)


def test_without_the_package_nothing_is_compared(
    one_case: complex_msas.Case, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches success, or a traceback, where DeepMind's package is not installed."""
    assert complex_msas.main(["--alphafold", str(Path(sys.executable))]) == 2
    message = capsys.readouterr().err
    assert "has no package alphafold" in message
    assert message.count("\n") == 1
