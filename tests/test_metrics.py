"""Metrics in cases with known answers: AlphaFold2's lDDT, invariances, and small structures computed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp import metrics
from evodsp.geometry.frames import Rigid
from evodsp.metrics import gdt_ts, lddt, lddt_ca, rmsd, superpose, tm_d0, tm_score
from tests.shared import load

GLOBAL = [lddt_ca, gdt_ts, tm_score]
ERRORS = [rmsd]


def random_chain(length: int = 60, seed: int = 0) -> Tensor:
    """A random walk with steps of 3.8 Å, the distance between neighbouring CA atoms."""
    steps = torch.randn(length, 3, generator=torch.Generator().manual_seed(seed))
    return (3.8 * steps / steps.norm(dim=-1, keepdim=True)).cumsum(0)


def random_motion(seed: int = 0) -> Rigid:
    """A random rotation and translation."""
    q = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    return Rigid.from_quaternion(q / q.norm(), torch.tensor([30.0, -20.0, 10.0]))


def noise(length: int, scale: float, seed: int = 5) -> Tensor:
    """Normally distributed coordinates."""
    return scale * torch.randn(length, 3, generator=torch.Generator().manual_seed(seed))


def test_lddt_ca_is_alphafolds(golden: Path) -> None:
    """Catches wrong thresholds, a wrong cutoff, and wrong treatment of masked residues."""
    expected, labels = load(golden / "losses_functions.npz"), load(golden / "labels.npz")
    predicted = torch.from_numpy(expected["in/final_atom_positions"][:, 1])
    true, mask = (torch.from_numpy(labels[name][:, 1]) for name in ("all_atom_positions", "all_atom_mask"))
    per_residue = lddt_ca(predicted, true, mask, per_residue=True)
    torch.testing.assert_close(per_residue, torch.from_numpy(expected["lddt_ca_per_residue"]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        lddt_ca(predicted, true, mask), torch.tensor(expected["lddt_ca_global"]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("metric", GLOBAL)
def test_perfect_prediction_scores_one_wherever_it_lies(metric) -> None:
    """Catches scores that change under rotation and translation."""
    true = random_chain()
    mask = torch.ones(len(true))
    torch.testing.assert_close(metric(true, true, mask), torch.tensor(1.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(metric(random_motion().apply(true), true, mask), torch.tensor(1.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("metric", ERRORS)
def test_perfect_prediction_has_no_error_wherever_it_lies(metric) -> None:
    """Catches errors that change under rotation and translation."""
    true = random_chain()
    assert metric(random_motion().apply(true), true, torch.ones(len(true))) < 1e-4


@pytest.mark.parametrize("metric", GLOBAL + ERRORS)
def test_masked_atoms_count_nowhere(metric) -> None:
    """Catches masked atoms that count, whether far away or at the origin, where missing atoms are stored."""
    true, mask = random_chain(), torch.ones(60)
    mask[[0, 7, 8, 30, 59]] = 0
    predicted = true + noise(60, 0.8)
    alone = metric(predicted[mask > 0], true[mask > 0], torch.ones(55))
    spoilt = torch.where(mask[:, None] > 0, predicted, torch.tensor(1e3)), true * mask[:, None]
    torch.testing.assert_close(metric(*spoilt, mask), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("metric", GLOBAL + ERRORS)
def test_batch_is_a_structure_at_a_time(metric) -> None:
    """Catches a batch whose structures affect each other."""
    true = torch.stack([random_chain(seed=s) for s in range(3)])
    predicted = true + torch.stack([noise(60, s) for s in (0.3, 1.0, 3.0)])
    mask = torch.ones(3, 60)
    mask[1, 20:] = 0
    expected = torch.stack([metric(*one) for one in zip(predicted, true, mask, strict=True)])
    torch.testing.assert_close(metric(predicted, true, mask), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metric(predicted[None], true[None], mask[None])[0], expected, rtol=1e-5, atol=1e-6)


def test_mirror_image_is_told_apart() -> None:
    """Catches a superposition that reflects: the mirror image would be a perfect prediction."""
    true = random_chain(120)
    mirrored, mask = true * torch.tensor([1.0, 1.0, -1.0]), torch.ones(120)
    assert tm_score(mirrored, true, mask) < 0.5
    assert gdt_ts(mirrored, true, mask) < 0.6
    assert rmsd(mirrored, true, mask) > 3.0
    rotation = superpose(mirrored, true, mask).rotation
    torch.testing.assert_close(torch.linalg.det(rotation), torch.tensor(1.0))


def test_superposition_finds_the_motion() -> None:
    """Catches a wrong rotation or translation, such as the inverse."""
    true, motion = random_chain().double(), random_motion()
    motion = Rigid(motion.rotation.double(), motion.translation.double())
    found = superpose(true, motion.apply(true), torch.ones(60))
    torch.testing.assert_close(found.rotation, motion.rotation, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.translation, motion.translation, rtol=0, atol=1e-4)


@pytest.mark.parametrize("atoms", [1, 2, 4])
def test_superposition_of_degenerate_structures_is_a_rotation(atoms: int) -> None:
    """Catches a matrix that is no rotation for points on a line, where the rotation is not unique."""
    line = torch.arange(atoms).float()[:, None] * torch.tensor([1.0, 2.0, 3.0])
    found = superpose(line, -line, torch.ones(atoms))
    torch.testing.assert_close(found.rotation @ found.rotation.T, torch.eye(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.linalg.det(found.rotation), torch.tensor(1.0))
    assert rmsd(line, -line, torch.ones(atoms)) < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_positions_that_are_not_finite_have_scores(value: float) -> None:
    """An exception in a validation: it would end a training run whose prediction of one chain overflows."""
    true = random_chain()
    predicted = true.clone()
    predicted[7] = value
    mask = torch.ones(60)
    assert rmsd(predicted, true, mask).isnan()
    for metric in (lddt_ca, gdt_ts, tm_score):
        assert not metric(predicted, true, mask) > 0.99
    assert rmsd(true, true, mask) < 1e-3


def test_rmsd_by_hand() -> None:
    """Catches a wrong centre or mean.

    Three atoms on a line, the outer two 0.3 Å further out: the deviation is 0.3 sqrt(2/3).
    """
    true = torch.tensor([[-3.0, 0, 0], [0, 0, 0], [3, 0, 0]])
    expected = torch.tensor(0.3 * (2 / 3) ** 0.5)
    torch.testing.assert_close(rmsd(1.1 * true, true, torch.ones(3)), expected)


def test_lddt_by_hand() -> None:
    """Catches wrong counts.

    Distances 10, 14.9 and 4.9 (20 and more do not count): with errors 0.6, 0.6 and 0, 3/4, 3/4 and all are preserved.
    """
    true = torch.tensor([[0.0, 0, 0], [10, 0, 0], [14.9, 0, 0], [40, 0, 0]])
    predicted = true + torch.tensor([[-0.6, 0, 0], [0, 0, 0], [0, 0, 0], [100, 0, 0]])
    mask = torch.ones(4)
    expected = torch.tensor([0.75, 0.875, 0.875, 1.0])
    torch.testing.assert_close(lddt_ca(predicted, true, mask, per_residue=True), expected)
    torch.testing.assert_close(lddt_ca(predicted, true, mask), torch.tensor((0.75 + 0.75 + 1) / 3))


def test_lddt_ignores_distances_within_a_residue() -> None:
    """Catches distances within a residue that count: stretching one may matter only for the other residue."""
    true = torch.tensor([[[0.0, 0, 0], [0, 1.5, 0]], [[5.0, 0, 0], [5, 1.5, 0]]])
    apart = true + torch.tensor([[[0.0, 0, 0]] * 2, [[3.0, 0, 0]] * 2])
    assert lddt(true, true, torch.ones(2, 2)) == 1
    # all four distances between the residues grow by 2 to 4 Å
    torch.testing.assert_close(lddt(apart, true, torch.ones(2, 2)), torch.tensor(0.25))


def test_lddt_in_blocks_is_lddt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches errors at block edges: large structures are scored some residues at a time, with a shorter last block."""
    true = random_chain(42).view(14, 3, 3)
    predicted, mask = true + noise(42, 1.0).view(14, 3, 3), (torch.arange(42) % 5 > 0).float().view(14, 3)
    whole = lddt(predicted, true, mask, per_residue=True), lddt(predicted, true, mask)
    monkeypatch.setattr(metrics, "_PAIRS_AT_ONCE", 4 * 14 * 9)
    assert torch.equal(lddt(predicted, true, mask, per_residue=True), whole[0])
    torch.testing.assert_close(lddt(predicted, true, mask), whole[1])


def test_tm_score_by_hand() -> None:
    """Catches a single superposition of all residues.

    Half of the chain is exact, the other half far away: half of the residues score 1, the others almost 0.
    """
    true = random_chain(100)
    predicted = true.clone()
    predicted[50:] += torch.tensor([500.0, 0, 0])
    torch.testing.assert_close(tm_score(predicted, true, torch.ones(100)), torch.tensor(0.5), rtol=0, atol=1e-3)
    torch.testing.assert_close(gdt_ts(predicted, true, torch.ones(100)), torch.tensor(0.5), rtol=0, atol=1e-6)
    # one superposition of all residues would fit neither half
    assert rmsd(predicted, true, torch.ones(100)) > 100


def test_tm_d0_is_the_published_scale() -> None:
    """Catches another scale than 1.24 (L - 15)^(1/3) - 1.8 with a minimum of 0.5: 3.65 Å at 100 residues, 6.36 Å at 300."""
    assert tm_d0(100) == pytest.approx(3.652, abs=1e-3)
    assert tm_d0(300) == pytest.approx(6.360, abs=1e-3)
    assert tm_d0(5) == tm_d0(21) == 0.5


def test_gdt_counts_each_cutoff_at_its_own_best() -> None:
    """Catches one superposition for all cutoffs.

    Half of the chain is moved by 3 Å. Superposing one half puts 1/2 within 1 and 2 Å; midway, none is within 1, all
    within 2 Å.
    """
    true, mask = random_chain(100), torch.ones(100)
    predicted = true.clone()
    predicted[50:] += torch.tensor([0.0, 0.0, 3.0])
    best = [gdt_ts(predicted, true, mask, cutoffs=(cutoff,)).item() for cutoff in metrics.GDT_TS_CUTOFFS]
    assert 0.5 <= best[0] < 0.8
    assert best[1:] == [1, 1, 1]
    assert gdt_ts(predicted, true, mask).item() >= sum(best) / 4 - 1e-6


@pytest.mark.parametrize("length", [8, 12, 16, 20, 30])
def test_every_fragment_of_a_short_chain_is_tried(length: int) -> None:
    """Catches scores of peptides up to 0.17 too low, because no seed lay where the prediction is right."""
    true, mask = random_chain(length), torch.ones(length)
    for right in range(0, length - 3, 3):
        predicted = true + noise(length, 6.0)
        predicted[right : right + 4] = true[right : right + 4]
        index = torch.arange(length)
        ends = itertools.combinations(range(length + 1), 2)
        parts = torch.stack([(index >= start) & (index < end) for start, end in ends if end - start >= 3])
        moved = superpose(predicted, true, parts.double()).unsqueeze(-1).apply(predicted.double())
        found = (1 / (1 + ((moved - true).norm(dim=-1) / tm_d0(length)).square())).mean(-1)
        assert tm_score(predicted, true, mask) > found.max() - 1e-5


def test_search_refines_beyond_its_seeds() -> None:
    """Catches a search without refinement.

    Every third residue is far off, so no contiguous fragment fits; refinement must leave those residues out.
    """
    true, mask = random_chain(120), torch.ones(120)
    predicted = random_motion().apply(true)
    predicted[::3] += noise(40, 12.0)
    assert gdt_ts(predicted, true, mask, cutoffs=(0.01,)) == pytest.approx(2 / 3)
    assert tm_score(predicted, true, mask) > 2 / 3


@pytest.mark.parametrize("metric", [gdt_ts, tm_score])
def test_scores_fall_as_noise_grows(metric) -> None:
    """Catches a score that does not fall when noise grows."""
    true, mask = random_chain(), torch.ones(60)
    scores = [metric(true + noise(60, scale), true, mask).item() for scale in (0.0, 0.5, 1.5, 4.0, 12.0)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1.0)
    assert scores[-1] < 0.4


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_tiny_chains_have_scores(length: int) -> None:
    """Catches errors for chains with fewer atoms than a superposition needs, or without a pair of residues."""
    true, mask = random_chain(length), torch.ones(length)
    for metric in (gdt_ts, tm_score, lddt_ca):
        torch.testing.assert_close(
            metric(random_motion().apply(true), true, mask), torch.tensor(1.0), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("metric", [gdt_ts, tm_score, rmsd])
def test_no_observed_atoms_give_zero(metric) -> None:
    """Catches NaN for a chain without coordinates, which would make an epoch's mean NaN."""
    assert metric(random_chain(), random_chain(seed=1), torch.zeros(60)) == 0
