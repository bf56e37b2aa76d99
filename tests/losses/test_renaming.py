"""Symmetric renaming (algorithm 26) against AlphaFold2's numbers and the formula over all pairs of atoms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp.losses.permutation import alternative_naming_is_better, compute_renamed_ground_truth
from tests.shared import load


@pytest.fixture(scope="module")
def labels(golden: Path) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value)[None] for key, value in load(golden / "labels.npz").items()}


def test_renaming_is_alphafolds(golden: Path, labels) -> None:
    """Catches a comparison with the wrong atoms, positions swapped without their masks, and frames that keep the old names."""
    reference = {key: torch.from_numpy(value) for key, value in load(golden / "losses_functions.npz").items()}
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
