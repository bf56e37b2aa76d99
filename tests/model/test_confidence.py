"""pLDDT, predicted aligned error and predicted TM-score, against AlphaFold2's numbers and an independent formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.model.confidence import compute_pae, compute_plddt, compute_ptm, highest_pae
from tests.conftest import load


def test_plddt_is_alphafolds(golden: Path) -> None:
    """Catches bin edges taken for centres, which would shift every score by 1."""
    reference = load(golden / "losses_functions.npz")
    plddt = compute_plddt(torch.from_numpy(reference["in/logits_predicted_lddt"]))
    expected = torch.from_numpy(reference["confidence/plddt"])
    torch.testing.assert_close(plddt.double(), expected, rtol=1e-5, atol=0)


def test_pae_and_ptm_are_alphafolds(golden: Path) -> None:
    """Catches bin edges taken for centres, a last bin of the wrong width, and the TM-score's scale."""
    reference = load(golden / "losses_functions.npz")
    logits = torch.from_numpy(reference["in/logits_predicted_aligned_error"])[None]
    expected = torch.from_numpy(reference["confidence/predicted_aligned_error"])
    torch.testing.assert_close(compute_pae(logits)[0], expected, rtol=1e-5, atol=0)
    assert highest_pae(64) == float(reference["confidence/max_predicted_aligned_error"])
    ptm = compute_ptm(logits, torch.ones(1, logits.shape[1]))
    assert ptm.item() == pytest.approx(float(reference["confidence/ptm"]), rel=1e-5)


def test_padding_does_not_change_ptm(golden: Path) -> None:
    """Catches padded residues in the length, in the mean, or chosen as the best frame."""
    logits = torch.from_numpy(load(golden / "losses_functions.npz")["in/logits_predicted_aligned_error"])[None]
    padded = torch.zeros_like(logits)
    padded[..., 0] = 50  # certain: the padding would win
    padded[:, :64, :64] = logits[:, :64, :64]
    mask = (torch.arange(72) < 64).float()[None]
    expected = compute_ptm(logits[:, :64, :64], torch.ones(1, 64))
    torch.testing.assert_close(compute_ptm(padded, mask), expected)


@pytest.mark.parametrize("residues", [5, 17, 22])
def test_ptm_of_a_short_chain(residues: int) -> None:
    """Catches d0 of a short chain: not a number below 15 residues, negative to 17, and any lower bound other than 19."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(residues + 2, residues + 2, 64)).astype(np.float32)
    logits[..., :3] += 3  # errors below 1.5 Å: there d0 decides
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
