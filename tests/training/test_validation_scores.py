"""What a validation says of a chain: scores of its structure, and how far its confidence is off."""

from __future__ import annotations

import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.geometry.residues import CA
from evodsp.metrics import lddt_ca
from evodsp.model.alphafold import AlphaFold
from evodsp.training.config import DataConfig
from evodsp.training.scores import known_scores, score
from tests.builders.labelled_batch import batch_of
from tests.builders.small_model import SMALL, config, features


def test_confidence_is_compared_where_the_truth_is_known() -> None:
    """Catches a mean over padding and residues without a CA, fractions compared with points, and the sign."""
    torch.manual_seed(0)
    model = AlphaFold(config()).double().eval()
    with torch.no_grad():
        for parameter in model.heads.plddt.parameters():
            parameter.normal_()
        batch = {**features(2), **batch_of(2, SMALL[2])}
        output = model(batch)
    found = score(output, batch)
    for b in range(2):
        known = batch["all_atom_mask"][b, :, CA] > 0
        assert 0 < known.sum() < SMALL[2] or b > 0
        probabilities = output.logits["plddt"][b, known].softmax(-1)
        centres = torch.arange(0.5, probabilities.shape[-1]) * 100 / probabilities.shape[-1]
        plddt = (probabilities * centres).sum(-1).mean()
        atoms = (output.structure.positions[b, known][:, CA], batch["all_atom_positions"][b, known][:, CA])
        true = 100 * lddt_ca(*atoms, torch.ones(int(known.sum())), per_residue=True).mean()
        assert float(found["plddt"][b]) == pytest.approx(float(plddt), abs=1e-5)
        assert float(found["plddt_too_high"][b]) == pytest.approx(float(plddt - true), abs=1e-4)


def test_a_validation_repeats() -> None:
    """Catches scores of two steps that differ because a part of each chain, or a number of cycles, is drawn."""
    assert DataConfig().validation == FeatureConfig(crop_size=None, uniform_recycling=False)


def test_a_chain_has_no_score_of_an_interface_that_it_lacks() -> None:
    """Catches a column of nan, and a score of the chain itself that is dropped or kept by mistake."""
    nan = float("nan")
    assert known_scores({"lddt_ca": 0.5, "interface_lddt_ca": nan}) == {"lddt_ca": 0.5}
    assert known_scores({"lddt_ca": 0.5, "interface_lddt_ca": 0.25}) == {"lddt_ca": 0.5, "interface_lddt_ca": 0.25}
