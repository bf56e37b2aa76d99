"""Frame-aligned point error against AlphaFold2's numbers and against the formula written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.losses import structure
from evodsp.losses.structure import backbone_fape, frame_aligned_point_error, sidechain_fape


def _trajectory(traj: Tensor) -> Rigid:
    """Frames of all iterations, from quaternions and translations [T, R, 7] to a rigid [T, 1, R]."""
    return Rigid.from_quaternion(traj[:, None, :, :4], traj[:, None, :, 4:])


def _random_rotations(generator: torch.Generator, *shape: int) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(*shape, 3, 3, generator=generator, dtype=torch.float64))
    q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[..., None, :]
    return q * torch.linalg.det(q)[..., None, None]


def _problem(frames: int, points: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Predicted and true rotations, translations and points, and masks: float64, with distances on both sides of 10 Å."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return 8 * torch.randn(*batch, *shape, 3, generator=generator, dtype=torch.float64)

    rotation, true_rotation = (_random_rotations(generator, *batch, frames) for _ in range(2))
    masks = [(torch.rand(*batch, n, generator=generator) < 0.7).double() for n in (frames, points)]
    return rotation, randn(frames), true_rotation, randn(frames), randn(points), randn(points), *masks


def _formula(problem: tuple[Tensor, ...], clamp: float | None) -> Tensor:
    """Algorithm 28 written out, with all F x A vectors."""
    rotation, translation, true_rotation, true_translation, points, true_points, frame_mask, point_mask = problem
    local = torch.einsum("...fij,...fai->...faj", rotation, points[..., None, :, :] - translation[..., None, :])
    true_vectors = true_points[..., None, :, :] - true_translation[..., None, :]
    true_local = torch.einsum("...fij,...fai->...faj", true_rotation, true_vectors)
    distance = ((local - true_local).square().sum(-1) + 1e-4).sqrt()
    if clamp is not None:
        distance = distance.clamp(max=clamp)
    error = distance * frame_mask[..., None] * point_mask[..., None, :]
    return error.sum((-1, -2)) / 10 / (frame_mask.sum(-1) * point_mask.sum(-1) + 1e-4)


def _fape(problem: tuple[Tensor, ...], **options: object) -> Tensor:
    rotation, translation, true_rotation, true_translation, points, true_points, frame_mask, point_mask = problem
    frames, true_frames = Rigid(rotation, translation), Rigid(true_rotation, true_translation)
    return frame_aligned_point_error(frames, true_frames, frame_mask, points, true_points, point_mask, **options)


@pytest.mark.parametrize(("name", "clamped"), [("clamped", 1.0), ("unclamped", 0.0), ("mixed", 0.3)])
def test_backbone_fape_is_alphafolds(reference, labels, name: str, clamped: float) -> None:
    """Catches a wrong clamp, mask, length scale or normalisation, and clamped and unclamped samples mixed wrongly."""
    backbone = _trajectory(reference["in/traj"])
    truth = Rigid.from_flat12(labels["rigidgroups_gt_frames"][:, :, 0])
    mask, fraction = labels["backbone_affine_mask"], torch.tensor([clamped])
    mean = backbone_fape(backbone, truth, mask, fraction)
    last = backbone_fape(backbone[-1:], truth, mask, fraction)
    torch.testing.assert_close(mean[0], reference[f"backbone_fape_{name}/mean"], rtol=1e-5, atol=0)
    torch.testing.assert_close(last[0], reference[f"backbone_fape_{name}/last"], rtol=1e-5, atol=0)
    if name == "clamped":
        torch.testing.assert_close(mean, backbone_fape(backbone, truth, mask))


def test_backbone_fape_gradient_is_alphafolds(reference, labels) -> None:
    """Catches an error in the hand-written gradient.

    Of a quaternion's gradient only the part that rotates is compared: the length of a quaternion has no meaning.
    """
    trajectory = reference["in/traj"].clone().requires_grad_()
    truth = Rigid.from_flat12(labels["rigidgroups_gt_frames"][:, :, 0])
    backbone_fape(_trajectory(trajectory), truth, labels["backbone_affine_mask"]).sum().backward()
    assert trajectory.grad is not None
    quaternion = reference["in/traj"][..., :4]

    def rotational_part(gradient: Tensor) -> Tensor:
        along = (gradient[..., :4] * quaternion).sum(-1, keepdim=True)
        return torch.cat([gradient[..., :4] - along * quaternion, gradient[..., 4:]], dim=-1)

    expected = rotational_part(reference["grad_backbone_fape/traj"])
    torch.testing.assert_close(
        rotational_part(trajectory.grad), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )
    # For the first iteration, the gradient of the structure loss is half of the backbone FAPE's.
    first = rotational_part(reference["grad/traj"])[0]
    torch.testing.assert_close(
        rotational_part(trajectory.grad)[0] / 2, first, rtol=0, atol=1e-5 * float(first.abs().max())
    )


def test_sidechain_fape_is_alphafolds(reference, labels) -> None:
    """Catches groups and atoms flattened in different orders, and a side-chain FAPE without clamp."""
    renamed = reference["alt_naming_is_better"].bool()[None, :, None, None]
    frames = torch.where(renamed, labels["rigidgroups_alt_gt_frames"], labels["rigidgroups_gt_frames"])
    loss = sidechain_fape(
        Rigid.from_flat12(reference["in/frames_flat12"][-1:]), Rigid.from_flat12(frames), labels["rigidgroups_gt_exists"],
        reference["in/atom14_pos"][-1:], reference["renamed_atom14_gt_positions"][None],
        reference["renamed_atom14_gt_exists"][None],
    )  # fmt: skip
    torch.testing.assert_close(loss[0], reference["sidechain_fape"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("clamp", [10.0, None])
@pytest.mark.parametrize("chunk", [1, 60, 10**6])
def test_streaming_over_frames_changes_neither_value_nor_gradient(monkeypatch, clamp: float | None, chunk: int) -> None:
    """Catches frames lost or counted twice at the edges of chunks (11 frames do not divide), and a wrong gradient."""
    monkeypatch.setattr(structure, "CPU_PAIRS", chunk)
    problem = _problem(11, 7, batch=(2, 3))
    leaves = [problem[i].requires_grad_() for i in (0, 1, 4)]
    weights = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    expected, actual = _formula(problem, clamp), _fape(problem, clamp_distance=clamp)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad((x * weights).sum(), leaves) for x in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))


def test_nothing_observed_gives_zero_and_finite_gradients() -> None:
    """Catches 0 / 0 for a crop without any resolved residue."""
    problem = list(_problem(4, 5))
    problem[6], problem[7] = torch.zeros(4, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    loss = _fape((*problem[:4], problem[4].requires_grad_(), *problem[5:]))
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(problem[4].grad).all()


def test_coordinates_far_from_the_origin_keep_their_digits() -> None:
    """Catches cancellation in float32: crystal coordinates may lie hundreds of Å from the predicted ones."""
    problem = _problem(20, 30)
    shift = torch.tensor([900.0, -700.0, 400.0], dtype=torch.float64)
    far = tuple(x + shift if i in (3, 5) else x for i, x in enumerate(problem))
    near = _fape(tuple(x.float() for x in problem))
    torch.testing.assert_close(_fape(tuple(x.float() for x in far)), near, rtol=2e-6, atol=0)


def test_bfloat16_autocast_does_not_round_distances() -> None:
    """Catches a loss computed in bfloat16, whose spacing at 50 Å is 0.25 Å."""
    problem = tuple(x.float() for x in _problem(20, 30))
    points = problem[4].requires_grad_()
    (expected,) = torch.autograd.grad(_fape(problem), points)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _fape(problem)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, points)
    torch.testing.assert_close(gradient, expected)
