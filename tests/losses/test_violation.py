"""Violations of stereochemistry against AlphaFold2's numbers, and the sparse search for clashes against all pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.data.formats.mmcif import read_chain
from evodsp.geometry.frames import atom37_to_atom14
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK, RESTYPE_ATOM14_RADIUS, RESTYPE_ORDER, RESTYPES_WITH_X
from evodsp.losses import structure as pairs
from evodsp.losses.violation import find_violations, violating_residues, violation_loss
from tests.builders.pages import ROOT

BETWEEN, WITHIN = "between_residues", "within_residues"
NAMES = {
    "bond_loss": f"{BETWEEN}/bonds_c_n_loss_mean",
    "angle_ca_c_n_loss": f"{BETWEEN}/angles_ca_c_n_loss_mean",
    "angle_c_n_ca_loss": f"{BETWEEN}/angles_c_n_ca_loss_mean",
    "clash_atom_loss": f"{BETWEEN}/clashes_per_atom_loss_sum",
    "within_atom_loss": f"{WITHIN}/per_atom_loss_sum",
}


@pytest.fixture(scope="module")
def chain(features) -> tuple[Tensor, ...]:
    """atom14 mask, residue index and aatype of the golden chain, batch of one."""
    return tuple(features[name] for name in ("atom14_atom_exists", "residue_index", "aatype"))


@pytest.fixture(scope="module", params=["near native", "untrained"])
def problem(reference, losses, request) -> tuple[dict[str, Tensor], Tensor]:
    """AF2's violations, and the structure they were computed from."""
    if request.param == "near native":
        file, group, structure = reference, "violations/", "in/atom14_pos"
    else:
        file, group, structure = losses, "structure_module/violations/", "sidechains_atom_pos"
    violations = {key.removeprefix(group): value for key, value in file.items() if key.startswith(group)}
    return violations, file[structure][-1:]


def test_violations_are_alphafolds(chain, problem) -> None:
    """Catches masks computed from the aatype 0 of padding, the CA-C-N deviation of older releases, and wrong exclusions."""
    expected, atom14 = problem
    found = find_violations(atom14, *chain)
    for name, key in NAMES.items():
        tolerance = 1e-5 * float(expected[key].abs().max())
        torch.testing.assert_close(getattr(found, name)[0], expected[key], rtol=1e-5, atol=tolerance, msg=key)


def test_loss_is_alphafolds(chain, reference) -> None:
    """Catches clashes averaged over pairs, and terms left out."""
    loss = violation_loss(find_violations(reference["in/atom14_pos"][-1:], *chain), chain[0])
    assert loss.item() == pytest.approx(float(reference["structural_violation_loss"]), rel=1e-5)


def _crowd(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random residues in a small box, with gaps, a repeated and an out-of-order residue number, and missing atoms."""
    generator = torch.Generator().manual_seed(seed)
    atom14 = 3 * torch.randn(2, 12, 14, 3, generator=generator, dtype=torch.float64)
    index = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 7, 8, 20, 9, 10]] * 2)
    aatype = torch.randint(0, 21, (2, 12), generator=generator)
    aatype[:, :2] = RESTYPE_ORDER["C"]
    mask = torch.from_numpy(RESTYPE_ATOM14_MASK).double()[aatype]
    return atom14, mask * (torch.rand(mask.shape, generator=generator) > 0.1), index, aatype


def _all_pairs(atom14: Tensor, mask: Tensor, index: Tensor, aatype: Tensor) -> Tensor:
    """The summed overlap of each atom, as the supplement's formula states it, from an array of all pairs."""
    atoms = torch.arange(index.shape[1] * 14)
    slot, residue = atoms % 14, atoms // 14
    points, radius = atom14.flatten(1, 2), torch.from_numpy(RESTYPE_ATOM14_RADIUS).double()[aatype].flatten(1)
    distance = (1e-10 + (points[:, :, None] - points[:, None]).square().sum(-1)).sqrt()
    step = index[:, residue][:, None] - index[:, residue][:, :, None]
    peptide = (step == 1) & (slot[:, None] == 2) & (slot == 0)
    counted = (step > 0) & ~peptide & ~((slot[:, None] == 5) & (slot == 5))
    counted = counted * mask.flatten(1)[:, :, None] * mask.flatten(1)[:, None]
    overlap = counted * (radius[:, :, None] + radius[:, None] - 1.5 - distance).relu()
    return (overlap.sum(1) + overlap.sum(2)).view_as(mask)


@pytest.mark.parametrize("pairs_at_once", [1, 5000, 1 << 22])
def test_clashes_equal_those_of_all_pairs(monkeypatch, pairs_at_once: int) -> None:
    """Catches pairs lost or counted twice at the edges of blocks, and gradients unlike the formula's."""
    monkeypatch.setattr(pairs, "CPU_PAIRS", pairs_at_once)
    atom14, *rest = _crowd(1)
    results = []
    for find in (lambda *x: find_violations(*x).clash_atom_loss, _all_pairs):
        points = atom14.clone().requires_grad_()
        per_atom = find(points, *rest)
        weight = torch.linspace(0.5, 2, per_atom.numel(), dtype=torch.float64).view_as(per_atom)
        (weight * per_atom).sum().backward()
        results.append((per_atom.detach(), points.grad))
    assert (results[0][0] > 0).sum() > 50
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradient_is_the_losss() -> None:
    """Catches a detached term: the gradient must equal the numerical one."""
    atom14, mask, index, aatype = _crowd(2)
    atom14 = (0.3 * atom14[:1, :4]).requires_grad_()
    mask, index, aatype = mask[:1, :4], index[:1, :4], aatype[:1, :4]
    assert torch.autograd.gradcheck(lambda x: violation_loss(find_violations(x, mask, index, aatype), mask), atom14)


def test_coincident_atoms_have_a_finite_gradient(chain) -> None:
    """Catches the infinite slope of the square root at zero: an untrained model places all residues at the origin."""
    mask, index, aatype = chain
    atom14 = torch.zeros(1, index.shape[1], 14, 3, requires_grad=True)
    loss = violation_loss(find_violations(atom14, mask, index, aatype), mask)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert atom14.grad is not None
    assert atom14.grad.isfinite().all()


def test_one_residue_and_no_clash_are_no_errors() -> None:
    """Catches errors on empty lists of pairs and bonds."""
    aatype, index = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    mask = torch.from_numpy(RESTYPE_ATOM14_MASK)[aatype]
    found = find_violations(torch.zeros(1, 1, 14, 3), mask, index, aatype)
    assert found.clash_atom_loss.sum() == found.bond_loss.item() == 0
    assert (found.within_atom_loss > 0).sum() == 5


def test_residues_with_violations_are_named() -> None:
    """Catches a bond that is charged to one of its residues only or to the wrong one, and kinds that are mixed up."""
    chain = read_chain(ROOT / "data" / "mmcif_files" / "s005.cif", "A")
    aatype = torch.tensor([RESTYPES_WITH_X.index(letter) for letter in chain.sequence])
    index = torch.arange(len(aatype))
    mask = atom37_to_atom14(torch.from_numpy(chain.mask).double(), aatype)

    def found(positions: np.ndarray, mask: torch.Tensor = mask) -> dict[str, list[int]]:
        atom14 = atom37_to_atom14(torch.from_numpy(positions), aatype)
        kinds = violating_residues(atom14, mask, index, aatype)
        return {kind: torch.nonzero(x)[:, 0].tolist() for kind, x in kinds.items()}

    good = chain.positions.astype(np.float64)
    assert found(good) == {"bond": [], "clash": [], "within": []}
    stretched = good.copy()
    stretched[20:] += np.array([0.0, 0.0, 0.6])
    assert found(stretched)["bond"] == [19, 20]
    assert found(stretched)["within"] == []
    last = len(aatype) - 1
    onto = good.copy()
    onto[last] += good[5, 1] - good[last, 1]  # both CA in one place
    assert {5, last} <= set(found(onto)["clash"])
    near = good.copy()
    near[last] += good[5, 1] + [1.7, 0, 0] - good[last, 1]  # 0.2 Å less than is tolerated
    only_ca = mask * (torch.arange(14) == 1)
    assert found(near, only_ca)["clash"] == [5, last]
    for shift in (1.0, 0.3):  # beyond the tolerance by more than 1 Å, and by less
        bent = good.copy()
        bent[7, 1] += shift
        assert found(bent)["within"] == [7]
