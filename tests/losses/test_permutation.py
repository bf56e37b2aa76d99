"""Alignment of copies of a chain against all permutations, and the labels that it gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.losses.permutation import (
    TrueChains,
    _with_hidden_chains,
    align_chains,
    alternative_naming_is_better,
    choose_anchor,
    compute_renamed_ground_truth,
    labels_of_crop,
)
from evodsp.losses.structure import frame_aligned_point_error
from evodsp.metrics import rmsd
from evodsp.rng import Draws
from tests.builders.host_waits import HostWaits

LENGTH = 24


@dataclass(frozen=True)
class Problem:
    """A complex and a crop of it; `predicted`, `asym_id` and `residue_index` belong to the crop."""

    predicted: Tensor
    asym_id: Tensor
    residue_index: Tensor
    truth: TrueChains

    def align(self, seed: int = 0) -> list[int]:
        found = align_chains(self.predicted, self.asym_id, self.residue_index, self.truth, Draws.root(seed))
        assert sorted(found.tolist()) == list(range(len(self.truth.entity_id)))
        return found.tolist()

    def keep(self, kept: Tensor) -> Problem:
        """The crop without the other residues."""
        return replace(
            self, predicted=self.predicted[kept], asym_id=self.asym_id[kept], residue_index=self.residue_index[kept]
        )

    def without_atoms(self, chain: int, residues: slice) -> Problem:
        """The same with unresolved atoms, which are at zero, in a true chain."""
        positions, mask = self.truth.positions.clone(), self.truth.mask.clone()
        positions[chain, residues] = mask[chain, residues] = 0
        return replace(self, truth=replace(self.truth, positions=positions, mask=mask))


def turn(angle: float) -> Tensor:
    """The rotation about the z axis."""
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=torch.float64)


MOTION = Rigid(turn(1.0) @ turn(0.5)[[1, 2, 0]][:, [1, 2, 0]], torch.tensor([40.0, -10, 7], dtype=torch.float64))
"""From the true complex to the prediction."""


def rings(copies: Sequence[int], seed: int, noise: float) -> Tensor:
    """Chains [C, L, 3]: each entity is a ring of copies about the z axis, its own number of Å away from it."""
    generator = torch.Generator().manual_seed(seed)
    chains = []
    for number, count in enumerate(copies):
        steps = 1.5 * torch.randn(LENGTH, 3, generator=generator, dtype=torch.float64)
        base = steps.cumsum(0) + torch.tensor([18.0 + 12 * number, 0, 5 * number], dtype=torch.float64)
        chains += [base @ turn(2 * math.pi * k / count).T for k in range(count)]
    exact = torch.stack(chains)
    return exact + noise * torch.randn(exact.shape, generator=generator, dtype=torch.float64)


def problem(
    copies: Sequence[int], order: Sequence[int], seed: int = 0, noise: float = 0.7, asymmetry: float = 0.7
) -> Problem:
    """A whole complex. Predicted chain k has the place of the true chain `order[k]`, in another frame, with errors."""
    true = rings(copies, seed, asymmetry)
    generator = torch.Generator().manual_seed(100 + seed)
    predicted = MOTION.apply(true)[list(order)] + noise * torch.randn(
        true.shape, generator=generator, dtype=torch.float64
    )
    entity = [number for number, count in enumerate(copies, start=1) for _ in range(count)]
    asym_id = torch.arange(1.0, len(true) + 1).repeat_interleave(LENGTH)
    residue_index = torch.arange(LENGTH).repeat(len(true))
    return Problem(
        predicted.flatten(0, 1), asym_id, residue_index, TrueChains(true, torch.ones_like(true[..., 0]), entity)
    )


def permutations(copies: Sequence[int]) -> list[list[int]]:
    """Every assignment that keeps sequences together."""
    starts = np.cumsum([0, *copies])
    parts = [itertools.permutations(range(s, s + c)) for s, c in zip(starts, copies, strict=False)]
    return [list(itertools.chain(*choice)) for choice in itertools.product(*parts)]


def totals(x: Problem, orders: list[list[int]]) -> Tensor:
    """RMSD of the whole complex under each assignment."""
    rows, residue = torch.tensor(orders)[:, x.asym_id.long() - 1], x.residue_index
    true = x.truth.positions[rows, residue]
    return rmsd(true, x.predicted.expand_as(true), x.truth.mask[rows, residue])


@pytest.mark.parametrize(
    ("copies", "asymmetry"),
    [
        *((copies, 0.7) for copies in [(2,), (3,), (4,), (2, 1), (2, 2), (3, 2), (4, 2), (3, 3), (4, 4)]),
        *((copies, 0.0) for copies in [(2, 3), (3, 4)]),
    ],
)
def test_the_alignment_is_the_best_of_all_permutations(copies: tuple[int, ...], asymmetry: float) -> None:
    """Catches a superposition the wrong way round, chains of another sequence, true chains that are used twice, candidates that
    are not tried, and assignments that are judged by the anchor alone, where its copies are alike and the others' are not.
    """
    every = permutations(copies)
    for seed in range(8):
        order = every[int(Draws.root(seed).integer(0, len(every)))]
        x = problem(copies, order, seed, asymmetry=asymmetry)
        assert x.align(seed) == every[int(totals(x, every).argmin())]
        if not asymmetry:
            assert x.align(seed) == order
            continue
        # Crops have holes, and true chains lack atoms.
        kept = torch.from_numpy(Draws.root(seed).at("crop").uniform(len(x.predicted)) < 0.7)
        x = x.keep(kept).without_atoms(0, slice(2, 9)).without_atoms(1, slice(12, 15))
        assert x.align(seed) == every[int(totals(x, every).argmin())]


@pytest.mark.parametrize(("beside", "wanted"), [(2, [2, 0, 1]), (1, [2, 1, 0])])
def test_of_two_chains_in_one_place_the_nearer_has_it(beside: int, wanted: list[int]) -> None:
    """Catches a true chain that is used twice, and chains that choose in the order of their numbers."""
    x = problem((3,), [2, 0, 0])
    x.predicted[x.asym_id == beside + 1] += 4.0
    anchor_is_0 = x.keep((x.asym_id == 1) | (x.residue_index != 3))
    assert anchor_is_0.align() == wanted


@pytest.mark.parametrize("order", permutations((3,)))
def test_a_homotrimer_with_exchanged_labels_has_the_same_loss(order: list[int]) -> None:
    """Catches the inverse of the permutation, and labels that are taken from the wrong chain or residue."""
    x = problem((3,), [0, 1, 2])
    generator = torch.Generator().manual_seed(5)
    beside = torch.randn(2, 3, LENGTH, 3, generator=generator, dtype=torch.float64)
    true = x.truth.positions
    labels = {
        "positions": true,
        "frames": Rigid.from_three_points(true + beside[0], true, true + beside[1]).to_flat12(),
        "numbers": torch.arange(3 * LENGTH, dtype=torch.int32).view(3, LENGTH),
    }
    kept = torch.arange(3 * LENGTH) % 5 != 3
    crop = x.keep(kept)
    predicted = crop.predicted
    frames = MOTION.compose(Rigid.from_flat12(labels["frames"].flatten(0, 1)))
    frames = Rigid(frames.rotation[kept], predicted)

    def loss(labels: dict[str, Tensor]) -> Tensor:
        ones, true_frames = torch.ones_like(predicted[:, 0]), Rigid.from_flat12(labels["frames"])
        return frame_aligned_point_error(frames, true_frames, ones, predicted, labels["positions"], ones)

    def of_crop(labels: dict[str, Tensor], permutation: Tensor) -> dict[str, Tensor]:
        return labels_of_crop(labels, permutation, crop.asym_id, crop.residue_index)

    wanted = of_crop(labels, torch.arange(3))
    torch.testing.assert_close(wanted["positions"], true.flatten(0, 1)[kept])
    exchanged = {name: label[order] for name, label in labels.items()}
    moved = replace(crop, truth=replace(crop.truth, positions=exchanged["positions"]))
    found = of_crop(exchanged, torch.tensor(moved.align()))
    for name in labels:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)
    assert loss(found) == loss(wanted)
    assert loss(found) < 0.2
    if order != [0, 1, 2]:
        assert loss(of_crop(exchanged, torch.arange(3))) > loss(found) + 0.01


def test_a_crop_without_one_of_the_copies() -> None:
    """Catches true chains that are offered only if the crop has the chain of their number."""
    x = problem((3,), [1, 0, 2])
    crop = x.keep(x.asym_id != 2)
    assert crop.align() == [1, 0, 2]
    x = problem((3,), [1, 2, 0])
    assert x.keep(x.asym_id != 2).align() == [1, 2, 0]  # chain 2 gets what is left
    x = problem((3, 2), [2, 0, 1, 4, 3])
    assert x.keep((x.asym_id != 2) & (x.asym_id != 5)).align() == [2, 0, 1, 4, 3]
    only = x.keep(x.asym_id == 3)
    assert sorted(only.align()[:3]) == [0, 1, 2]
    assert only.align()[3:] == [3, 4]


def test_hidden_chains_get_what_is_left() -> None:
    """Catches a hidden chain with the truth of another sequence, and shown chains that are taken for the first ones."""
    shown, assigned, entity = (torch.tensor(values) for values in ([2, 3], [1, 0], [1, 2, 2, 1]))
    assert _with_hidden_chains(shown, assigned, entity).tolist() == [3, 2, 1, 0]
    x = problem((3,), [0, 1, 2])
    positions = x.truth.positions.clone()
    positions[1] = positions[2]  # so the third chain fits both equally well, and keeps its own
    same = replace(x, truth=replace(x.truth, positions=positions))
    assert {tuple(same.keep(x.asym_id != 2).align(seed)) for seed in range(8)} == {(0, 1, 2)}


def test_padding_is_nothing() -> None:
    """Catches residues of padding (chain 0) that count as a chain, and labels in the padding."""
    x = problem((3,), [2, 0, 1])
    nothing = torch.full((5, 3), torch.nan, dtype=torch.float64)
    padded = replace(
        x,
        predicted=torch.cat([x.predicted, nothing]),
        asym_id=torch.cat([x.asym_id, torch.zeros(5)]),
        residue_index=torch.cat([x.residue_index, torch.zeros(5, dtype=torch.int64)]),
    )
    assert padded.align() == x.align() == [2, 0, 1]
    labels = {"a": torch.ones(3, LENGTH, 2), "b": torch.ones(3, LENGTH, dtype=torch.int32)}
    for label in labels_of_crop(labels, torch.arange(3), padded.asym_id, padded.residue_index).values():
        assert label[:-5].eq(1).all()
        assert label[-5:].eq(0).all()


def test_true_chains_without_atoms_come_last() -> None:
    """Catches absent atoms (at zero) that count as places, and chains without common atoms that count as perfect."""
    x = problem((3,), [2, 0, 1])
    assert x.without_atoms(2, slice(None)).align()[1:] == [0, 1]
    # The prediction has no true atoms to compare with in chain 2's place; the crop shows two chains.
    crop = x.keep(x.asym_id != 1).without_atoms(2, slice(None))
    assert crop.align() == [2, 0, 1]


def test_an_assignment_that_loses_a_chain_comes_last() -> None:
    """Catches copies that are exchanged because a chain then has no label at all, and so adds no error."""
    half = LENGTH // 2
    x = problem((2,), [0, 1], noise=0.5, asymmetry=0.0)
    x = replace(
        x, predicted=x.predicted + torch.where(x.asym_id == 2, 4.0, 0.0)[:, None]
    )  # one chain lies beside its place
    # The crop shows the first half of chain 1 and the second half of chain 2, which is not resolved in the first copy.
    first, second = x.residue_index < half, x.residue_index >= half
    crop = x.keep(((x.asym_id == 1) & first) | ((x.asym_id == 2) & second)).without_atoms(0, slice(half, None))
    exchanged, own = totals(crop.keep(crop.asym_id == 1), [[1, 0]]), totals(crop, [[0, 1]])
    assert exchanged < own, "the exchange compares half of the residues, with a smaller RMSD"
    assert {tuple(crop.align(seed)) for seed in range(8)} == {(0, 1)}  # the stream chooses either chain as the anchor


def test_a_copy_with_two_common_atoms_is_no_candidate() -> None:
    """Catches superpositions that too few atoms determine, which fit the anchor perfectly."""
    x = problem((2,), [0, 1], noise=2.0)
    crop = x.keep(x.asym_id == 1)
    assert crop.without_atoms(1, slice(2, None)).align() == [0, 1]
    assert crop.without_atoms(0, slice(3, None)).without_atoms(1, slice(2, None)).align() == [0, 1]


def test_without_an_anchor_chains_keep_their_truth() -> None:
    """Catches an anchor without resolved residues, whose superposition is arbitrary."""
    x = problem((3,), [2, 0, 1])
    for chain in range(3):
        x = x.without_atoms(chain, slice(2, None))
    assert x.align() == [0, 1, 2]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_prediction_that_is_not_finite_changes_nothing(value: float) -> None:
    """Catches a step that dies, or an arbitrary exchange, where the loss would have reported the number."""
    x = problem((2, 3), [1, 0, 4, 2, 3])
    x.predicted[7] = value
    assert x.align() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("entity", "resolved", "anchor"),
    [
        ([1, 1, 2, 2, 2], [5, 6, 90, 90, 90], 1),  # fewest copies, whatever their size; then the longest in the crop
        ([1, 1, 2, 2, 2], [5, 6, 90, 0, 0], 1),  # copies are those of the complex
        ([1, 1, 2, 2, 2], [0, 0, 9, 8, 7], 2),  # the crop does not show the other one
        ([1, 1, 2, 2, 2], [2, 2, 9, 8, 7], 2),  # nor enough of it
        ([1, 2, 3, 3], [8, 9, 70, 70], 1),
        ([1, 1], [2, 0], None),
    ],
)
def test_the_anchor_is_the_least_ambiguous_chain(entity: list[int], resolved: list[int], anchor: int | None) -> None:
    """Catches copies that are counted in the crop, lengths before copies, and anchors without atoms."""
    for seed in range(5):
        assert choose_anchor(entity, resolved, Draws.root(seed)) == anchor


def test_the_stream_alone_decides_between_equal_anchors() -> None:
    """Catches a choice by the process's random state, which differs between ranks, and one that never varies."""

    def chosen(state: int) -> list[int | None]:
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002
        return [choose_anchor([1, 1, 2, 3, 3], [9, 9, 2, 8, 9], Draws.root(seed)) for seed in range(40)]

    assert set(chosen(0)) == {0, 1, 4}
    assert chosen(0) == chosen(1)


def test_rounding_does_not_decide_between_equal_assignments() -> None:
    """Catches ranks that differ in a symmetric complex, where several assignments are equally good up to rounding."""
    every = permutations((3, 3))
    found = set()
    for seed in range(40):
        x = problem((3, 3), [1, 2, 0, 4, 5, 3], noise=0, asymmetry=0)
        assert (totals(x, every) < 1e-6).sum() == 3
        found.add(tuple(disturbed(x, seed).align(seed)))
    assert found == {(0, 1, 2, 3, 4, 5)}  # of the three, the one that exchanges nothing


def test_rounding_does_not_decide_between_equal_chains() -> None:
    """Catches ranks that differ where two true chains fit equally well and neither is the chain's own."""
    x = problem((4,), [2, 3, 0, 1])
    x.truth.positions[3] = x.truth.positions[2]
    x.predicted[x.asym_id == 2] = x.predicted[x.asym_id == 1]
    assert {tuple(disturbed(x, seed).align()) for seed in range(40)} == {(2, 3, 0, 1)}


def disturbed(x: Problem, seed: int) -> Problem:
    """The same up to errors as large as those of rounding."""
    generator = torch.Generator().manual_seed(seed)
    predicted, positions = (
        y + 1e-9 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
        for y in (x.predicted, x.truth.positions)
    )
    return replace(x, predicted=predicted, truth=replace(x.truth, positions=positions))


def test_precision_does_not_decide() -> None:
    """Catches sums in the dtype of the prediction, far from the origin."""
    x = problem((4,), [2, 0, 3, 1])
    far = replace(
        x, predicted=(x.predicted + 3000).float(), truth=replace(x.truth, positions=x.truth.positions.float())
    )
    assert far.align() == [2, 0, 3, 1]


def test_the_host_waits_once() -> None:
    """Catches a second copy from the device, and complexes without copies that wait at all."""

    def waits(entity: list[int]) -> int:
        with HostWaits() as seen:
            found = align_chains(
                torch.zeros(9, 3, device="meta"), torch.zeros(9, device="meta"), torch.zeros(9, device="meta"),
                TrueChains(torch.zeros(3, 9, 3, device="meta"), torch.zeros(3, 9, device="meta"), entity), Draws.root(0),
            )  # fmt: skip
        assert found.tolist() == [0, 1, 2]
        return len(seen.waits)

    assert waits([1, 1, 2]) == 1
    assert waits([1, 2, 3]) == 0
    labels = {"a": torch.zeros(3, 9, 2, device="meta")}
    with HostWaits() as seen:
        residues = torch.zeros(9, device="meta")
        crop = labels_of_crop(labels, torch.zeros(3, dtype=torch.int64, device="meta"), residues, residues)
    assert seen.waits == []
    assert crop["a"].shape == (9, 2)


def test_nothing_is_differentiated() -> None:
    """Catches a graph that is kept from the alignment."""
    x = problem((2,), [1, 0])
    x.predicted.requires_grad_()
    assert x.align() == [1, 0]
    assert x.predicted.grad_fn is None


def test_renaming_is_alphafolds(reference, labels) -> None:
    """Catches a comparison with the wrong atoms, positions swapped without their masks, and frames that keep the old names."""
    renamed = compute_renamed_ground_truth(labels, reference["in/atom14_pos"][-1:])
    assert renamed.alternative.sum() > 3
    torch.testing.assert_close(renamed.alternative[0], reference["alt_naming_is_better"], rtol=0, atol=0)
    torch.testing.assert_close(renamed.atom14[0], reference["renamed_atom14_gt_positions"], rtol=0, atol=0)
    torch.testing.assert_close(renamed.atom14_mask[0], reference["renamed_atom14_gt_exists"], rtol=0, atol=0)
    flat = torch.cat([renamed.frames.rotation.flatten(-2), renamed.frames.translation], dim=-1)
    swapped = renamed.alternative.bool()
    torch.testing.assert_close(flat[swapped], labels["rigidgroups_alt_gt_frames"][swapped], rtol=0, atol=0)
    torch.testing.assert_close(flat[~swapped], labels["rigidgroups_gt_frames"][~swapped], rtol=0, atol=0)


def test_prediction_equal_to_a_naming_chooses_it(labels) -> None:
    """Catches an inverted choice, and residues without ambiguous atoms that are renamed because of rounding errors."""
    truth, alternative = labels["atom14_gt_positions"], labels["atom14_alt_gt_positions"]
    exists, ambiguous = labels["atom14_gt_exists"], labels["atom14_atom_is_ambiguous"]
    arguments = truth, alternative, exists, ambiguous
    assert alternative_naming_is_better(truth, *arguments).sum() == 0
    symmetric = ((truth - alternative).abs().amax(-1) * exists * ambiguous).amax(-1) > 0
    assert symmetric.any()
    torch.testing.assert_close(alternative_naming_is_better(alternative, *arguments), symmetric.float())


def test_choice_is_the_formulas_over_all_pairs(labels) -> None:
    """Catches distances that are left out but matter. The formula here uses all R x R x 14 x 14 pairs."""

    exists, ambiguous = (labels[key] for key in ("atom14_gt_exists", "atom14_atom_is_ambiguous"))
    truth, other = (labels[key] for key in ("atom14_gt_positions", "atom14_alt_gt_positions"))
    prediction = truth + 3 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))

    def distances(x: Tensor) -> Tensor:
        return (x[:, :, None, :, None] - x[:, None, :, None]).square().sum(-1).add(1e-10).sqrt()  # [1, R, R, 14, 14]

    weight = (exists * ambiguous)[:, :, None, :, None] * (exists * (1 - ambiguous))[:, None, :, None]
    errors = [((distances(x) - distances(prediction)).abs() * weight).sum((2, 3, 4)) for x in (truth, other)]
    expected = (errors[1] < errors[0]).float()
    assert 0 < expected.sum() < ambiguous.amax(-1).sum()
    torch.testing.assert_close(alternative_naming_is_better(prediction, truth, other, exists, ambiguous), expected)
