"""pLDDT, predicted aligned error and predicted TM-score, against AlphaFold2's numbers and an independent formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.model.confidence import compute_pae, compute_plddt, compute_ptm, highest_pae
from tests.shared import load


def test_plddt_is_alphafolds(golden: Path) -> None:
    """Catches bin edges used as centres, which would shift every score by 1."""
    reference = load(golden / "losses_functions.npz")
    plddt = compute_plddt(torch.from_numpy(reference["in/logits_predicted_lddt"]))
    expected = torch.from_numpy(reference["confidence/plddt"])
    torch.testing.assert_close(plddt.double(), expected, rtol=1e-5, atol=0)


def test_pae_and_ptm_are_alphafolds(golden: Path) -> None:
    """Catches bin edges used as centres, a wrong width of the last bin, and a wrong scale of the TM-score."""
    reference = load(golden / "losses_functions.npz")
    logits = torch.from_numpy(reference["in/logits_predicted_aligned_error"])[None]
    expected = torch.from_numpy(reference["confidence/predicted_aligned_error"])
    torch.testing.assert_close(compute_pae(logits)[0], expected, rtol=1e-5, atol=0)
    assert highest_pae(64) == float(reference["confidence/max_predicted_aligned_error"])
    ptm = compute_ptm(logits, torch.ones(1, logits.shape[1]))
    assert ptm.item() == pytest.approx(float(reference["confidence/ptm"]), rel=1e-5)


def test_padding_does_not_change_ptm(golden: Path) -> None:
    """Catches padded residues that count in the length or in the mean, or that are chosen as the best frame."""
    logits = torch.from_numpy(load(golden / "losses_functions.npz")["in/logits_predicted_aligned_error"])[None]
    padded = torch.zeros_like(logits)
    padded[..., 0] = 50  # errors of 0 with certainty: a padded frame would be the best
    padded[:, :64, :64] = logits[:, :64, :64]
    mask = (torch.arange(72) < 64).float()[None]
    expected = compute_ptm(logits[:, :64, :64], torch.ones(1, 64))
    torch.testing.assert_close(compute_ptm(padded, mask), expected)


@pytest.mark.parametrize("residues", [5, 17, 22])
def test_ptm_of_a_short_chain(residues: int) -> None:
    """Catches a wrong d0 of short chains: NaN below 15 residues, negative up to 17, or a minimum length other than 19."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(residues + 2, residues + 2, 64)).astype(np.float32)
    logits[..., :3] += 3  # errors below 1.5 Å, where the score depends on d0 most
    mask = np.arange(residues + 2) < residues
    d0 = 1.24 * (max(residues, 19) - 15) ** (1 / 3) - 1.8
    best = 0.0
    for frame in range(residues):
        scores = []
        for atom in range(residues):
            weights = np.exp(logits[frame, atom].astype(np.float64))
            errors = [(k + 0.5) * 0.5 for k in range(64)]
            scores.append(sum(w / (1 + (e / d0) ** 2) for w, e in zip(weights, errors, strict=True)) / weights.sum())
        best = max(best, float(np.mean(scores)))
    ptm = compute_ptm(torch.from_numpy(logits)[None], torch.from_numpy(mask)[None].float())
    assert ptm.item() == pytest.approx(best, rel=1e-5)
