"""The experimentally resolved head's loss against AlphaFold2's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp.losses.total import experimentally_resolved_loss
from tests.shared import load


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
def test_only_structures_within_the_resolution_bounds_count(golden: Path, resolution: float, counts: bool) -> None:
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
