"""Losses of the heads (distogram, masked MSA, pLDDT, aligned error, resolved atoms) against AlphaFold2's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.config import HeadsConfig
from evodsp.geometry.frames import Rigid
from evodsp.losses.total import (
    aligned_error_bins,
    cross_entropy,
    distance_bins,
    distogram_loss,
    experimentally_resolved_loss,
    masked_msa_loss,
    pae_loss,
    plddt_loss,
)
from tests.shared import load

_EDGES = HeadsConfig().distogram_min_distance, HeadsConfig().distogram_max_distance


def test_distogram_loss_is_alphafolds(golden: Path) -> None:
    """Catches boundaries off by one bin, distances that are not squared, and unresolved residues in the mean."""
    reference = load(golden / "losses_functions.npz")
    labels = {key: torch.from_numpy(value)[None] for key, value in load(golden / "labels.npz").items()}
    logits = torch.from_numpy(reference["in/logits_distogram"])[None]
    loss = distogram_loss(logits, labels["pseudo_beta"], labels["pseudo_beta_mask"], *_EDGES)
    torch.testing.assert_close(loss[0], torch.tensor(reference["distogram_loss"]), rtol=1e-5, atol=0)


def test_masked_msa_loss_is_alphafolds(golden: Path) -> None:
    """Catches a mean over all letters instead of the masked ones. (The reference uses the features of the first cycle.)"""
    reference = load(golden / "losses_functions.npz")
    features = {key: torch.from_numpy(value)[:1] for key, value in load(golden / "features_processed.npz").items()}
    logits = torch.from_numpy(reference["in/logits_masked_msa"])[None]
    loss = masked_msa_loss(logits, features["true_msa"], features["bert_mask"])
    torch.testing.assert_close(loss[0], torch.tensor(reference["masked_msa_loss"]), rtol=1e-5, atol=0)


def test_distance_bins_at_the_boundaries() -> None:
    """Catches bins closed at the wrong end: a distance equal to a boundary belongs to the lower bin."""
    boundaries = torch.linspace(2.0, 8.0, 4, dtype=torch.float64)  # exactly 2, 4, 6, 8
    distances = torch.tensor([0.0, 2.0, 2.1, 4.0, 7.9, 8.0, 8.1, 1000.0], dtype=torch.float64)
    positions = torch.stack([distances, torch.zeros(8), torch.zeros(8)], dim=-1).double()[None]
    bins = distance_bins(positions, len(boundaries) + 1, 2.0, 8.0)
    assert bins[0, 0].tolist() == [0, 0, 1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(bins, bins.mT)


def test_samples_without_targets_give_zero_and_do_not_touch_others() -> None:
    """Catches 0 / 0, and a mean over the whole batch instead of one per sample."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 23, generator=generator)
    letters = torch.randint(0, 22, (2, 3, 4), generator=generator, dtype=torch.int32)
    mask = torch.ones(2, 3, 4)
    mask[0] = 0
    loss = masked_msa_loss(logits, letters, mask)
    assert loss[0].item() == 0
    torch.testing.assert_close(loss[1:], masked_msa_loss(logits[1:], letters[1:], mask[1:]))


def test_cross_entropy_of_half_precision_logits_is_float32() -> None:
    """Catches a logarithm taken in bfloat16, whose spacing near 4 is 0.03."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.arange(5)
    loss = cross_entropy(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -logits.float().log_softmax(-1)[torch.arange(5), target])


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
def test_confidence_counts_within_the_resolution_bounds(problem, resolution: float, counts: bool) -> None:
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


def _inputs(golden: Path, logits: Tensor) -> list[Tensor]:
    exists = load(golden / "features_processed.npz")["atom37_atom_exists"][:1]
    observed = load(golden / "labels.npz")["all_atom_mask"][None]
    return [logits[None], torch.from_numpy(observed), torch.from_numpy(exists)]


@pytest.mark.parametrize("case", ["near native", "end to end"])
def test_loss_is_alphafolds(golden: Path, case: str) -> None:
    """Catches a mean over padding, or over all 37 atom slots, most of which a residue does not have."""
    if case == "near native":
        reference = load(golden / "losses_functions.npz")
        logits = reference["in/logits_experimentally_resolved"]
    else:
        reference = load(golden / "losses.npz")
        logits = load(golden / "outputs.npz")["experimentally_resolved/logits"]
    loss = experimentally_resolved_loss(*_inputs(golden, torch.from_numpy(logits)), torch.tensor([2.0]), 0.1, 3.0)
    assert loss.item() == pytest.approx(float(reference["experimentally_resolved_loss"]), rel=1e-5)


@pytest.mark.parametrize(("resolution", "counts"), [(0.0, False), (0.1, True), (3.0, True), (3.01, False)])
def test_resolved_atoms_count_within_the_resolution_bounds(golden: Path, resolution: float, counts: bool) -> None:
    """Catches training on predicted structures: they have every atom and would teach that all atoms are resolved."""
    inputs = _inputs(golden, torch.zeros(72, 37))
    loss = experimentally_resolved_loss(*inputs, torch.tensor([resolution]), 0.1, 3.0)
    assert (loss.item() > 0) == counts


def test_large_logits_stay_finite() -> None:
    """Catches the logarithm of a sigmoid that was rounded to zero, also in bfloat16."""
    logits = torch.full((1, 2, 37), 500.0, dtype=torch.bfloat16)
    ones = torch.ones(1, 2, 37)
    loss = experimentally_resolved_loss(logits, 1 - ones, ones, torch.tensor([2.0]), 0.1, 3.0)
    assert loss.item() == pytest.approx(500)
    assert loss.dtype == torch.float32
