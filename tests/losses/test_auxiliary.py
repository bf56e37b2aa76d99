"""Distogram and masked-MSA losses against AlphaFold2's numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from evodsp.config import HeadsConfig
from evodsp.losses.total import cross_entropy, distance_bins, distogram_loss, masked_msa_loss
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
