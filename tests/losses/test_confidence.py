"""Predicted lDDT-CA: loss and reading against AlphaFold2's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp.losses.confidence import compute_plddt, plddt_loss
from tests.conftest import load


@pytest.fixture(scope="module")
def problem(golden: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The reference, and logits, CA, true CA and mask of its prediction."""
    reference = {key: torch.from_numpy(value) for key, value in load(golden / "losses_functions.npz").items()}
    labels = {key: torch.from_numpy(value)[None] for key, value in load(golden / "labels.npz").items()}
    return reference, [
        reference["in/logits_predicted_lddt"][None],
        reference["in/final_atom_positions"][None, :, 1],
        labels["all_atom_positions"][:, :, 1],
        labels["all_atom_mask"][:, :, 1],
    ]


def test_plddt_loss_is_alphafolds(problem) -> None:
    """Catches bins off by one, lDDT on a 0 to 100 scale, and unobserved residues in the mean."""
    reference, inputs = problem
    loss = plddt_loss(*inputs, torch.tensor([2.0]), 0.1, 3.0)
    torch.testing.assert_close(loss[0], reference["plddt_loss"], rtol=1e-5, atol=0)


def test_plddt_is_alphafolds(problem) -> None:
    """Catches bin edges taken for centres, which would shift every score by 1."""
    reference, inputs = problem
    plddt = compute_plddt(inputs[0])[0]
    torch.testing.assert_close(plddt.double(), reference["confidence/plddt"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("resolution", "counts"), [(0.0, False), (0.1, True), (3.0, True), (3.01, False)])
def test_only_structures_within_the_resolution_bounds_count(problem, resolution: float, counts: bool) -> None:
    """Catches predicted and NMR structures (resolution 0) or poor maps training the confidence."""
    loss = plddt_loss(*problem[1], torch.tensor([resolution]), 0.1, 3.0)
    assert (loss.item() > 0) == counts


def test_perfect_prediction_falls_in_the_last_bin(problem) -> None:
    """Catches lDDT 1 falling out of the bins."""
    logits, _, truth, mask = problem[1]
    certain = torch.zeros_like(logits)
    certain[..., -1] = 50
    assert plddt_loss(certain, truth, truth, mask, torch.tensor([2.0]), 0.1, 3.0).item() < 1e-6


def test_confidence_does_not_move_the_structure(problem) -> None:
    """Catches a gradient from the confidence loss into the coordinates."""
    logits, ca, truth, mask = problem[1]
    ca, logits = ca.clone().requires_grad_(), logits.clone().requires_grad_()
    plddt_loss(logits, ca, truth, mask, torch.tensor([2.0]), 0.1, 3.0).sum().backward()
    assert ca.grad is None
    assert logits.grad is not None
