"""pLDDT against lDDT-CA."""

from __future__ import annotations

import numpy as np
import pytest

from evodsp.inference.pages.figures import Calibration, calibration_figure


def test_numbers_of_a_known_case():
    """Catches means over chains instead of residues, a sign the wrong way round, a last bin that loses pLDDT 100, and ties."""
    found = Calibration.of(
        [
            (np.array([92.0, 98.0, 100.0]), np.array([72.0, 68.0, 70.0])),
            (np.array([40.0]), np.array([50.0])),
            (np.array([45.0, 45.0]), np.array([50.0, 60.0])),
        ]
    )
    bins = list(found.bins())
    assert [(one.lower, one.residues) for one in bins] == [(40, 3), (90, 3)]
    assert bins[1].plddt == pytest.approx(290 / 3)
    assert bins[1].lddt == pytest.approx(70.0)
    assert found.too_high == pytest.approx((420 - 370) / 6)
    assert found.error == pytest.approx(((160 - 130) + (290 - 210)) / 6)
    # Ranks, of which equal values share the mean: 4, 5, 6, 1, 2.5, 2.5 and 6, 4, 5, 1.5, 1.5, 3, with variances of 17 / 6.
    by_residue = 13.25 / 17
    assert found.line("held-out") == (
        f"held-out: pLDDT 70.0, true lDDT-CA 61.7: 8.3 too high; Spearman's correlation {by_residue:.2f} over 6 residues, "
        "1.00 over 3 structures"
    )


def test_a_constant_has_no_correlation():
    """Catches a nan in the line, a warning of numpy's, and a picture that needs two sets."""
    found = Calibration.of([(np.full(4, 80.0), np.array([90.0, 80.0, 95.0, 91.0]))])
    assert (
        found.line("train")
        == "train: pLDDT 80.0, true lDDT-CA 89.0: 9.0 too low; Spearman's correlation – over 4 residues"
    )
    assert "train: 4 residues, off by 9 on average" in calibration_figure({"train": found})
