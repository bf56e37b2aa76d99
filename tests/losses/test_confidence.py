"""Losses of the predicted lDDT-CA and the predicted aligned error, against AlphaFold2's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.losses.total import aligned_error_bins, pae_loss, plddt_loss
from tests.shared import load


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
    """Catches bins off by one, lDDT on a scale of 0 to 100, and unresolved residues in the mean."""
    reference, inputs = problem
    loss = plddt_loss(*inputs, torch.tensor([2.0]), 0.1, 3.0)
    torch.testing.assert_close(loss[0], reference["plddt_loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("resolution", "counts"), [(0.0, False), (0.1, True), (3.0, True), (3.01, False)])
def test_only_structures_within_the_resolution_bounds_count(problem, resolution: float, counts: bool) -> None:
    """Catches pLDDT trained on NMR or predicted structures (resolution 0) or on maps of low resolution."""
    loss = plddt_loss(*problem[1], torch.tensor([resolution]), 0.1, 3.0)
    assert (loss.item() > 0) == counts


def test_perfect_prediction_falls_in_the_last_bin(problem) -> None:
    """Catches an lDDT of exactly 1 that falls beyond the last bin."""
    logits, _, truth, mask = problem[1]
    certain = torch.zeros_like(logits)
    certain[..., -1] = 50
    assert plddt_loss(certain, truth, truth, mask, torch.tensor([2.0]), 0.1, 3.0).item() < 1e-6


def test_confidence_does_not_move_the_structure(problem) -> None:
    """Catches a gradient from the pLDDT loss into the coordinates."""
    logits, ca, truth, mask = problem[1]
    ca, logits = ca.clone().requires_grad_(), logits.clone().requires_grad_()
    plddt_loss(logits, ca, truth, mask, torch.tensor([2.0]), 0.1, 3.0).sum().backward()
    assert ca.grad is None
    assert logits.grad is not None


@pytest.fixture(scope="module", params=["losses_functions", "end to end"])
def aligned(golden: Path, request) -> tuple[dict[str, Tensor], list]:
    """The reference, and logits, frames, true frames and mask of its prediction."""
    truth = {key: torch.from_numpy(value)[None] for key, value in load(golden / "labels.npz").items()}
    if request.param == "losses_functions":
        reference = load(golden / "losses_functions.npz")
        trajectory, logits = reference["in/traj"], reference["in/logits_predicted_aligned_error"]
    else:
        reference = load(golden / "losses.npz")
        trajectory = reference["structure_module/traj"]
        logits = load(golden / "outputs.npz")["predicted_aligned_error/logits"]
    frames = torch.from_numpy(trajectory)[-1:]
    backbone = Rigid.from_quaternion(frames[..., :4], frames[..., 4:])
    true_backbone = Rigid.from_flat12(truth["rigidgroups_gt_frames"][:, :, 0])
    inputs = [torch.from_numpy(logits)[None], backbone, true_backbone, truth["backbone_affine_mask"]]
    return {key: torch.from_numpy(np.asarray(value)) for key, value in reference.items()}, inputs


def test_pae_loss_is_alphafolds(aligned) -> None:
    """Catches frames and points exchanged, bins off by one, and a diagonal that rounding moves into the second bin."""
    reference, inputs = aligned
    loss = pae_loss(*inputs, torch.tensor([2.0]), 0.1, 3.0)
    torch.testing.assert_close(loss[0], reference["pae_loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("resolution", "counts"), [(0.0, False), (0.1, True), (3.0, True), (3.01, False)])
def test_pae_learns_within_the_resolution_bounds_only(aligned, resolution: float, counts: bool) -> None:
    """Catches PAE trained on NMR or predicted structures (resolution 0) or on maps of low resolution."""
    assert (pae_loss(*aligned[1], torch.tensor([resolution]), 0.1, 3.0).item() > 0) == counts


def test_pae_does_not_move_the_structure(aligned) -> None:
    """Catches a gradient from the PAE loss into the frames."""
    logits, backbone, truth, mask = aligned[1]
    translation = backbone.translation.clone().requires_grad_()
    logits = logits.clone().requires_grad_()
    pae_loss(logits, Rigid(backbone.rotation, translation), truth, mask, torch.tensor([2.0]), 0.1, 3.0).sum().backward()
    assert translation.grad is None
    assert logits.grad is not None


def test_aligned_error_bins_know_frame_from_point(aligned) -> None:
    """Catches a transposed error: turning a residue about its CA changes the errors in its frame, not the errors of its CA."""
    truth = aligned[1][2][:, :6]
    half_turn = torch.tensor([-1.0, -1.0, 1.0])
    rotation = truth.rotation.clone()
    rotation[:, 2] = rotation[:, 2] * half_turn
    bins = aligned_error_bins(Rigid(rotation, truth.translation), truth, 64)
    changed = bins > 1  # rounding errors alone reach bin 1
    assert changed[0, 2].sum() == 5
    assert not changed[0, [0, 1, 3, 4, 5]].any()
    assert not bins.diagonal(dim1=1, dim2=2).any()
