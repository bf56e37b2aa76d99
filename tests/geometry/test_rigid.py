"""Rigid motions: conventions, inverses, batch axes and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evodsp.geometry.frames import Rigid, rotated

BATCH = (5, 3)


def random_rigid(*shape: int, seed: int = 0) -> Rigid:
    generator = torch.Generator().manual_seed(seed)
    quaternion = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    translation = 10 * torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    return Rigid.from_quaternion(quaternion / quaternion.norm(dim=-1, keepdim=True), translation)


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def homogeneous(rigid: Rigid) -> Tensor:
    top = torch.cat([rigid.rotation, rigid.translation.unsqueeze(-1)], -1)
    bottom = top.new_tensor([0.0, 0.0, 0.0, 1.0]).expand(*top.shape[:-2], 1, 4)
    return torch.cat([top, bottom], -2)


def test_compose_is_the_product_of_homogeneous_matrices() -> None:
    """Catches operands in the wrong order, or rows taken for columns."""
    a, b = random_rigid(*BATCH), random_rigid(*BATCH, seed=1)
    torch.testing.assert_close(homogeneous(a.compose(b)), homogeneous(a) @ homogeneous(b))
    torch.testing.assert_close(a.compose(b).apply(points(*BATCH)), a.apply(b.apply(points(*BATCH))))


def test_apply_and_apply_inverse_undo_each_other() -> None:
    a, x = random_rigid(*BATCH), points(*BATCH)
    torch.testing.assert_close(a.apply_inverse(a.apply(x)), x)
    torch.testing.assert_close(a.apply(a.apply_inverse(x)), x)


def test_batch_axes_broadcast() -> None:
    """The structure module applies one frame per residue to the points of all heads."""
    a, x = random_rigid(*BATCH), points(*BATCH, 4, 2)
    moved = a[:, :, None, None].apply(x)
    assert moved.shape == x.shape
    torch.testing.assert_close(moved[2, 1, 3], a[2, 1].apply(x[2, 1, 3]))
    chain = a.unsqueeze(-1).compose(random_rigid(8, seed=2))
    assert chain.shape == (*BATCH, 8)
    assert chain.rotation.shape == (*BATCH, 8, 3, 3)


def test_indexing_leaves_rotations_whole() -> None:
    """Catches an index that is applied to the axes of the rotation matrix."""
    a = random_rigid(*BATCH)
    assert a[1].shape == (3,)
    assert a[..., 1].shape == (5,)
    assert a[:, None].shape == (5, 1, 3)
    assert a[1:3, 0].shape == (2,)
    with pytest.raises(IndexError):
        a[0, 0, 0]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_stack_and_unsqueeze_count_batch_axes(dim: int) -> None:
    a = random_rigid(*BATCH)
    expected = torch.stack([a.translation[..., 0]] * 2, dim).shape
    assert Rigid.stack([a, a], dim).shape == expected
    assert Rigid.stack([a, a], dim).rotation.shape == (*expected, 3, 3)
    assert a.unsqueeze(dim).shape == a.translation[..., 0].unsqueeze(dim).shape
    if dim not in (2, -3):
        assert Rigid.cat([a, a], dim).shape == torch.cat([a.translation[..., 0]] * 2, dim).shape


def test_flat12_is_row_major() -> None:
    a = random_rigid(*BATCH)
    torch.testing.assert_close(a.to_flat12()[..., 3:6], a.rotation[..., 1, :])
    again = Rigid.from_flat12(a.to_flat12())
    torch.testing.assert_close(again.rotation, a.rotation, rtol=0, atol=0)
    torch.testing.assert_close(again.translation, a.translation, rtol=0, atol=0)


def test_from_three_points_convention() -> None:
    """x away from the first point, y towards the third, z right-handed."""
    frame = Rigid.from_three_points(*torch.tensor([[-2.0, 1, 1], [1, 1, 1], [5, 4, 1]], dtype=torch.float64))
    torch.testing.assert_close(frame.rotation, torch.eye(3, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(frame.translation, torch.ones(3, dtype=torch.float64))


def test_from_quaternion_turns_the_right_way() -> None:
    """A rotation by 90° about z maps x to y."""
    half = torch.tensor(torch.pi / 4, dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    turn = Rigid.from_quaternion(torch.stack([half.cos(), zero[0], zero[0], half.sin()]), zero)
    expected = torch.tensor([0.0, 1, 0], dtype=torch.float64)
    torch.testing.assert_close(turn.apply(torch.tensor([1.0, 0, 0], dtype=torch.float64)), expected)


def test_identity_and_scale() -> None:
    x = points(*BATCH)
    identity = Rigid.identity(BATCH, like=x)
    assert identity.rotation.dtype == torch.float64
    torch.testing.assert_close(identity.apply(x), x)
    a = random_rigid(*BATCH)
    torch.testing.assert_close(a.scale_translation(10.0).translation, 10 * a.translation)
    torch.testing.assert_close(a.scale_translation(10.0).rotation, a.rotation)


def test_stop_rotation_gradient_keeps_the_translations() -> None:
    flat = random_rigid(4).to_flat12().requires_grad_()
    Rigid.from_flat12(flat).stop_rotation_gradient().apply(points(4)).sum().backward()
    assert not flat.grad[:, :9].any()
    assert flat.grad[:, 9:].all()


def test_gradients() -> None:
    """Against finite differences, through every operation that the structure module differentiates."""

    def chain(q: Tensor, t: Tensor, flat: Tensor, x: Tensor) -> Tensor:
        a = Rigid.from_quaternion(q / q.norm(dim=-1, keepdim=True), t)
        b = Rigid.from_flat12(flat)
        return a.compose(b).apply(b.apply_inverse(x))

    inputs = [points(2), points(2) * 3, random_rigid(2).to_flat12(), points(2) + 1]
    inputs[0] = torch.cat([torch.ones(2, 1, dtype=torch.float64), inputs[0]], -1)
    torch.autograd.gradcheck(chain, [x.detach().requires_grad_() for x in inputs])
    corners = [points(6)[i : i + 2].clone().requires_grad_() for i in (0, 2, 4)]
    torch.autograd.gradcheck(lambda *p: Rigid.from_three_points(*p).to_flat12(), corners)


def test_planes_are_points_in_another_order() -> None:
    """Catches coordinates taken for points."""
    a, x = random_rigid(*BATCH), points(*BATCH, 7)
    torch.testing.assert_close(a.apply_to_planes(x.mT), a.unsqueeze(-1).apply(x).mT)
    torch.testing.assert_close(a.apply_inverse_to_planes(x.mT), a.unsqueeze(-1).apply_inverse(x).mT)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 1), (3,)), ((3,), (2, 1)), ((), (2,))])
@pytest.mark.parametrize("many", [1, 4])
def test_gradients_of_rotated_planes(shapes: tuple[tuple[int, ...], tuple[int, ...]], many: int) -> None:
    """Catches a gradient with the shape of the result, where an input was broadcast, and a rotation that is not turned back."""
    rotation = random_rigid(*shapes[0]).rotation.requires_grad_()
    planes = points(*shapes[1], many).mT.contiguous().requires_grad_()
    torch.testing.assert_close(rotated(rotation, planes), rotation @ planes)
    torch.autograd.gradcheck(rotated, (rotation, planes))
    torch.autograd.gradgradcheck(rotated, (rotation, planes))


def test_coinciding_points_have_finite_frames_and_gradients() -> None:
    """Missing residues are all zeros; a nan from them would spread to other gradients as 0 * nan."""
    corners = torch.zeros(3, 4, 3, requires_grad=True)
    frame = Rigid.from_three_points(*corners)
    assert not frame.rotation.any()
    frame.to_flat12().sum().backward()
    assert corners.grad.isfinite().all()


def test_autocast_does_not_round_coordinates() -> None:
    """Catches a matrix product, which would run in bf16 here and move atoms by tenths of an Å."""
    a, x = random_rigid(50), 50 * points(50)
    a, x = Rigid(a.rotation.float(), a.translation.float()), x.float()
    exact = a.compose(a).apply(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(a.compose(a).apply(x), exact, rtol=0, atol=0)
