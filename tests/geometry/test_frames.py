"""Torsions, frames, atoms and labels: AlphaFold2's numbers on real chains, and cases that these do not cover."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.geometry import residues
from evodsp.geometry.frames import (
    Constant,
    Rigid,
    atom14_ground_truth,
    atom14_to_atom37,
    atom37_to_atom14,
    atom37_to_frames,
    atom37_to_torsion_angles,
    frames_to_atom14,
    pseudo_beta,
    structure_labels,
    torsion_angles_to_frames,
)
from tests.builders.host_waits import HostWaits
from tests.shared import load

CHAINS = ["1psm_A", "4i6p_A", "4zey_A", "5kc1_A"]
ATOM14_NAMES = {  # golden name -> ours
    "atom14_positions": "atom14_gt_positions",
    "atom14_mask": "atom14_gt_exists",
    "atom14_alt_positions": "atom14_alt_gt_positions",
    "atom14_alt_mask": "atom14_alt_gt_exists",
    "atom14_is_ambiguous": "atom14_atom_is_ambiguous",
    "atom14_atom_exists": "atom14_atom_exists",
}


@pytest.fixture(scope="module", params=CHAINS)
def chain(request: pytest.FixtureRequest, golden: Path) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x) for name, x in load(golden / f"geometry_{request.param}.npz").items()}


def structure(chain: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return chain["aatype"], chain["all_atom_positions"], chain["all_atom_mask"]


def every_residue(repeats: int = 2, seed: int = 0) -> tuple[Tensor, Rigid, Tensor]:
    """All 20 types with random backbones and torsions, in fp64: (aatype, backbone, angles)."""
    generator = torch.Generator().manual_seed(seed)
    aatype = torch.arange(20).repeat(repeats)
    angle = 2 * torch.pi * torch.rand(len(aatype), 7, generator=generator, dtype=torch.float64)
    quaternion = torch.randn(len(aatype), 4, generator=generator, dtype=torch.float64)
    translation = 10 * torch.randn(len(aatype), 3, generator=generator, dtype=torch.float64)
    backbone = Rigid.from_quaternion(quaternion / quaternion.norm(dim=-1, keepdim=True), translation)
    return aatype, backbone, torch.stack([angle.sin(), angle.cos()], -1)


def test_torsions_are_alphafolds(chain: dict[str, Tensor]) -> None:
    """Catches a wrong atom, sign (psi is measured to O) or neighbour. Undefined angles are noise in AF2, zero here."""
    ours = atom37_to_torsion_angles(*structure(chain))
    mask = chain["torsion_angles_mask"].unsqueeze(-1)
    torch.testing.assert_close(ours["torsion_angles_mask"], chain["torsion_angles_mask"], rtol=0, atol=0)
    for name in ("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos"):
        torch.testing.assert_close(ours[name], chain[name] * mask, rtol=0, atol=1e-5)


def test_frames_are_alphafolds(chain: dict[str, Tensor]) -> None:
    """Catches a wrong base atom or axis, and groups that the residue type or the structure does not have."""
    for name, ours in atom37_to_frames(*structure(chain)).items():
        torch.testing.assert_close(ours, chain[name], rtol=0, atol=1e-6, msg=name)


def test_atom14_is_alphafolds(chain: dict[str, Tensor]) -> None:
    """Catches atoms of the wrong slot, and equivalent atoms that keep their names."""
    ours = atom14_ground_truth(*structure(chain))
    for theirs, name in ATOM14_NAMES.items():
        torch.testing.assert_close(ours[name], chain[theirs], rtol=0, atol=0)
    atom37 = atom14_to_atom37(ours["atom14_gt_positions"], chain["aatype"])
    torch.testing.assert_close(atom37, chain["atom37_roundtrip"], rtol=0, atol=0)


def test_pseudo_beta_is_alphafolds(chain: dict[str, Tensor]) -> None:
    beta, mask = pseudo_beta(*structure(chain))
    torch.testing.assert_close(beta, chain["pseudo_beta"], rtol=0, atol=0)
    torch.testing.assert_close(mask, chain["pseudo_beta_mask"], rtol=0, atol=0)
    torch.testing.assert_close(pseudo_beta(chain["aatype"], chain["all_atom_positions"]), beta, rtol=0, atol=0)


def test_rebuilding_from_torsions_is_alphafolds(chain: dict[str, Tensor]) -> None:
    """Catches a side-chain group with the wrong parent. The reference has (1, 0) for undefined torsions."""
    backbone = Rigid.from_flat12(chain["rigidgroups_gt_frames"][:, 0])
    frames = torsion_angles_to_frames(backbone, chain["torsion_angles_sin_cos_placeholder"], chain["aatype"])
    torch.testing.assert_close(frames.to_flat12(), chain["rebuilt_frames_flat12"], rtol=0, atol=1e-5)
    torch.testing.assert_close(frames_to_atom14(frames, chain["aatype"]), chain["rebuilt_atom14"], rtol=0, atol=1e-5)


def test_labels_are_alphafolds(golden: Path) -> None:
    """All labels of training: every name, dtype and value, padding included."""
    expected = load(golden / "labels.npz")
    aatype = load(golden / "features_processed.npz")["aatype"][0]
    arrays = (aatype, expected["all_atom_positions"], expected["all_atom_mask"])
    ours = structure_labels(*(torch.from_numpy(array) for array in arrays))
    assert set(expected) - set(ours) == {"resolution", "backbone_affine_tensor"}
    torsion_mask = expected["torsion_angles_mask"]
    masks = {
        "torsion_angles_sin_cos": torsion_mask[..., None],
        "alt_torsion_angles_sin_cos": torsion_mask[..., None],
        "chi_angles": expected["chi_mask"],
        "rigidgroups_gt_frames": expected["rigidgroups_gt_exists"][..., None],
        "rigidgroups_alt_gt_frames": expected["rigidgroups_gt_exists"][..., None],
    }
    for name in set(expected) & set(ours):
        assert ours[name].dtype == torch.float32, name
        assert ours[name].isfinite().all(), name
        mask = masks.get(name, np.float32(1))
        np.testing.assert_allclose(ours[name].numpy() * mask, expected[name] * mask, rtol=0, atol=1e-5, err_msg=name)
    frames = Rigid.from_flat12(ours["rigidgroups_gt_frames"][:, 0])
    exists = expected["backbone_affine_mask"] > 0
    affine = torch.from_numpy(expected["backbone_affine_tensor"])
    rotation = Rigid.from_quaternion(affine[:, :4], affine[:, 4:]).rotation
    np.testing.assert_allclose(frames.rotation[exists], rotation[exists], rtol=0, atol=2e-6)


def test_torsions_survive_the_way_through_atoms() -> None:
    """Every torsion of every residue type, fp64: angles -> atoms -> angles. The real chains lack some types' angles."""
    aatype, backbone, angles = every_residue()
    atom14 = frames_to_atom14(torsion_angles_to_frames(backbone, angles, aatype), aatype)
    mask = torch.from_numpy(residues.RESTYPE_ATOM37_MASK).double()[aatype]
    ours = atom37_to_torsion_angles(aatype, atom14_to_atom37(atom14, aatype), mask)
    defined = ours["torsion_angles_mask"][:, 2:, None]
    expected_mask = torch.from_numpy(residues.CHI_ANGLES_MASK)[aatype].double()
    torch.testing.assert_close(ours["torsion_angles_mask"][:, 3:], expected_mask)
    assert ours["torsion_angles_sin_cos"].dtype == torch.float64
    # The tables' atoms have three decimals, so that planes and bond angles close only to a few thousandths.
    difference = (ours["torsion_angles_sin_cos"][:, 2:] - angles[:, 2:]) * defined
    assert difference.abs().max() < 5e-3


def test_half_a_turn_of_an_ambiguous_group_renames_its_atoms() -> None:
    """The alternative frames, torsions and atoms must be one and the same molecule."""
    aatype, backbone, angles = every_residue()
    mask = torch.from_numpy(residues.RESTYPE_ATOM37_MASK).double()[aatype]
    atom37 = atom14_to_atom37(frames_to_atom14(torsion_angles_to_frames(backbone, angles, aatype), aatype), aatype)
    is_symmetric = torch.from_numpy(residues.CHI_PI_PERIODIC)[aatype].double()
    turned = angles.clone()
    turned[:, 3:] *= (1 - 2 * is_symmetric).unsqueeze(-1)
    frames = torsion_angles_to_frames(backbone, turned, aatype)
    labels = structure_labels(aatype, atom37, mask)
    exists = labels["rigidgroups_gt_exists"][..., None]
    assert ((labels["rigidgroups_alt_gt_frames"] - frames.to_flat12()) * exists).abs().max() < 5e-3
    assert (labels["atom14_alt_gt_positions"] - frames_to_atom14(frames, aatype)).abs().max() < 0.06
    assert labels["atom14_atom_is_ambiguous"].sum() == 2 * (2 + 2 + 4 + 4)


def test_leading_axes_are_independent(chain: dict[str, Tensor]) -> None:
    """Catches omega or phi of one chain of a batch that use residues of another."""
    aatype, positions, mask = structure(chain)
    pair = [torch.stack([x, x.flip(0)]) for x in (aatype, positions, mask)]
    for function in (atom37_to_torsion_angles, atom37_to_frames, atom14_ground_truth):
        both = function(*pair)
        for index, single in enumerate([structure(chain), tuple(x[1] for x in pair)]):
            for name, value in function(*single).items():
                torch.testing.assert_close(both[name][index], value, rtol=0, atol=0, msg=name)


def test_unknown_residues_are_masked_and_finite() -> None:
    """X has a backbone frame but no atoms of its own in the tables."""
    aatype = torch.full((3,), 20)
    backbone = Rigid.identity((3,), like=torch.zeros(1))
    frames = torsion_angles_to_frames(backbone, torch.rand(3, 7, 2), aatype)
    assert not frames_to_atom14(frames, aatype).any()
    labels = structure_labels(aatype, torch.randn(3, 37, 3), torch.ones(3, 37))
    assert labels["rigidgroups_gt_exists"].tolist() == [[1, 0, 0, 1, 0, 0, 0, 0]] * 3
    assert not labels["atom14_gt_exists"].any()
    assert all(value.isfinite().all() for value in labels.values())


def test_missing_residues_have_finite_labels_and_gradients() -> None:
    """Catches nan or infinity in the backward pass of all-zero residues, which would spread to all gradients."""
    aatype = torch.arange(21)
    positions = torch.zeros(21, 37, 3, requires_grad=True)
    mask = torch.zeros(21, 37)
    torsions = atom37_to_torsion_angles(aatype, positions, mask)
    frames = atom37_to_frames(aatype, positions, mask)
    assert not torsions["torsion_angles_mask"].any()
    assert not torsions["torsion_angles_sin_cos"].any()
    assert not frames["rigidgroups_gt_exists"].any()
    (torsions["torsion_angles_sin_cos"].sum() + frames["rigidgroups_gt_frames"].sum()).backward()
    assert positions.grad.isfinite().all()


def test_gradients_of_torsion_angles_to_atoms() -> None:
    """The gradient of the atoms by backbone and angles, which the all-atom loss needs, against finite differences."""
    aatype, backbone, angles = every_residue(repeats=1)
    aatype = aatype[[1, 18]]  # Arg has four angles; Tyr is symmetric
    flat = backbone.to_flat12()[[1, 18]].requires_grad_()
    angles = angles[[1, 18]].requires_grad_()

    def atoms(flat: Tensor, angles: Tensor) -> Tensor:
        frames = torsion_angles_to_frames(Rigid.from_flat12(flat), angles, aatype)
        return atom14_to_atom37(frames_to_atom14(frames, aatype), aatype)

    torch.autograd.gradcheck(atoms, (flat, angles))


def test_atom14_and_atom37_undo_each_other_in_any_trailing_shape() -> None:
    """Catches a gather along the wrong axis: masks have no trailing axis, positions have one."""
    aatype = torch.arange(21).repeat(2, 1)
    atom14_mask = torch.from_numpy(residues.RESTYPE_ATOM14_MASK)[aatype]
    for trailing in ((), (3,), (2, 5)):
        mask = atom14_mask.reshape(*atom14_mask.shape, *(1,) * len(trailing))
        values = torch.randn(2, 21, 14, *trailing)
        again = atom37_to_atom14(atom14_to_atom37(values, aatype), aatype)
        torch.testing.assert_close(again, values * mask, rtol=0, atol=0)


# Tables of the geometry on a device: copied once, and usable wherever they are asked for.


def test_a_table_is_copied_to_a_device_once() -> None:
    """Catches a copy per use: each makes the host wait until the GPU has finished all that was launched before."""
    aatype, positions, mask = torch.zeros(5).long(), torch.zeros(5, 37, 3), torch.zeros(5, 37)
    arguments = [x.to("meta") for x in (aatype, positions, mask)]
    structure_labels(*arguments)
    with HostWaits() as seen:
        structure_labels(*arguments)
    assert seen.waits == []


def test_the_counter_sees_a_copy() -> None:
    """Catches a counter that would call any program free of waits."""
    with HostWaits() as seen:
        Constant(np.arange(3.0)).like(torch.zeros(2, device="meta"))
        torch.zeros(2, device="meta").tolist()
        float(torch.zeros(1, device="meta"))
        torch.zeros(2, device="meta").cpu()
        torch.zeros(2, device="meta")[torch.tensor([1])]
        torch.zeros(2).to("meta", non_blocking=True)
        torch.zeros(2, device="meta")[..., [1, 0]]
        torch.zeros(2, device="meta").new_tensor([1.0])
    found = [wait.split()[0] for wait in seen.waits]
    assert found[:5] == ["_to_copy", "_to_copy", "_local_scalar_dense", "_to_copy", "index"]
    assert found[5:] == ["_to_copy", "__getitem__", "new_tensor"]


def test_devices_and_dtypes_do_not_mix() -> None:
    """Catches a copy that is found again for another dtype or device."""
    table = Constant(np.array([1.5, 2.5]))
    for dtype in (torch.float64, torch.float32, torch.int64):
        assert table.on(torch.device("cpu"), dtype).dtype == dtype
        assert table.on(torch.device("meta"), dtype).device.type == "meta"
    torch.testing.assert_close(table.like(torch.zeros(1, dtype=torch.float64)), torch.tensor([1.5, 2.5]).double())


def test_a_table_first_used_in_inference_can_be_trained_with() -> None:
    """Catches "Inference tensors cannot be saved for backward" in a process that predicts first and trains later."""
    table, x = Constant(np.array([1.5, 2.5])), torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        table.like(x)
    (table.like(x) * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.5, 2.5]


def test_a_fake_copy_is_not_kept() -> None:
    """Catches shapes without numbers that a tool such as a memory estimate leaves behind for the run itself."""
    table = Constant(np.array([1.5, 2.5]))
    for _ in range(2):
        with FakeTensorMode() as mode:
            mode.from_tensor(torch.zeros(2)) + table.like(mode.from_tensor(torch.zeros(2)))
    assert table.like(torch.zeros(1)).tolist() == [1.5, 2.5]
