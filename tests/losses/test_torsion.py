"""Torsion losses (algorithm 27) against AlphaFold2's numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from evodsp.losses.structure import angle_norm_loss, torsion_loss


def _losses(unnormalized: Tensor, labels: dict[str, Tensor], features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Chi loss and angle norm loss of angle vectors [T, 1, R, 7, 2]."""
    keys = ("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask")
    truth, alternative, mask = (labels[key][:, :, 3:] for key in keys)
    chi = functional.normalize(unnormalized, dim=-1)[..., 3:, :]
    return torsion_loss(chi, truth, alternative, mask)[0], angle_norm_loss(unnormalized, features["seq_mask"])[0]


def test_losses_are_alphafolds(reference, labels, features) -> None:
    """Catches a mean over the wrong axes or masks, and chi angles not compared with their alternative, turned by pi."""
    chi, norm = _losses(reference["in/unnormalized_angles_sin_cos"][:, None], labels, features)
    torch.testing.assert_close(chi, reference["chi_loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(norm, reference["angle_norm_loss"], rtol=1e-5, atol=0)


def test_gradient_is_alphafolds(reference, labels, features) -> None:
    """Catches a detached iteration: the first iteration's angles get a gradient from these terms only."""
    angles = reference["in/unnormalized_angles_sin_cos"][:, None].clone().requires_grad_()
    chi, norm = _losses(angles, labels, features)
    (gradient,) = torch.autograd.grad(0.5 * chi + 0.01 * norm, angles)
    expected = reference["grad/unnormalized_angles_sin_cos"][0]
    torch.testing.assert_close(gradient[0, 0], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_each_angle_takes_the_nearer_of_truth_and_alternative() -> None:
    """Catches a choice per residue or per sample instead of per angle and iteration."""

    def vectors(*degrees: float) -> Tensor:
        radians = torch.tensor(degrees) * math.pi / 180
        return torch.stack([radians.sin(), radians.cos()], dim=-1)[None, None]

    truth, alternative = vectors(10, 10), vectors(190, 10)
    predicted = torch.stack([vectors(190, 10), vectors(10, 190)])
    loss = torsion_loss(predicted, truth, alternative, torch.ones(1, 1, 2))
    torch.testing.assert_close(loss, torch.tensor([4.0 / 4]))  # one of four angles is opposite: squared distance 4


def test_zero_angle_vector_has_a_finite_gradient() -> None:
    """Catches the infinite slope of the square root at a vector of length zero."""
    angles = torch.zeros(1, 1, 1, 7, 2, requires_grad=True)
    angle_norm_loss(angles, torch.ones(1, 1)).sum().backward()
    assert angles.grad is not None
    assert torch.isfinite(angles.grad).all()


def test_nothing_observed_gives_zero() -> None:
    """Catches 0 / 0 for a sample without side chains, which would make the batch's loss NaN."""
    angles = functional.normalize(torch.randn(2, 1, 3, 4, 2, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert torsion_loss(angles, angles[0], angles[0], torch.zeros(1, 3, 4)).item() == 0
    assert angle_norm_loss(angles, torch.zeros(1, 3)).item() == 0
