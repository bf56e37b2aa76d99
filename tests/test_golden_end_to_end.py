"""The whole of model_1_ptm with templates against DeepMind's AlphaFold2: outputs, loss terms and gradient norms."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.config import LossConfig
from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import CA
from evodsp.losses.structure import backbone_fape
from evodsp.losses.total import total_loss
from evodsp.metrics import lddt_ca
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput
from evodsp.weights.deepmind import load_arrays
from evodsp.weights.names import parameter_names
from tests.builders.golden import CONFIG, close
from tests.shared import load

REAL = 64  # residues, followed by 8 of padding
WEIGHTS = LossConfig(plddt=0.01, pae=0.1, experimentally_resolved=0.01, violation=1.0, scale_by_length=False)


@pytest.fixture(scope="module")
def model(golden: Path) -> AlphaFold:
    model = AlphaFold(CONFIG)
    load_arrays(model, parameter_names(CONFIG), load(golden / "params.npz"))
    return model


@pytest.fixture(scope="module")
def features(golden: Path) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v).unsqueeze(0) for k, v in load(golden / "features_processed.npz").items()}


@pytest.fixture(scope="module")
def labels(golden: Path) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v).unsqueeze(0) for k, v in load(golden / "labels.npz").items()}


def agrees(out: ModelOutput, expected: dict[str, np.ndarray]) -> None:
    """Check that the output agrees with `expected` up to 2e-5 of the maximum, and atoms up to 1e-3 Å.

    Padded residues are not compared.
    """
    ours = {
        "representations/msa": (out.representations["msa"], (slice(None), slice(REAL))),
        "representations/msa_first_row": (out.representations["msa"][:, 0], (slice(REAL),)),
        "representations/pair": (out.representations["pair"], (slice(REAL), slice(REAL))),
        "representations/single": (out.representations["single"], (slice(REAL),)),
        "representations/structure_module": (out.structure.single, (slice(REAL),)),
        "distogram/logits": (out.logits["distogram"], (slice(REAL), slice(REAL))),
        "masked_msa/logits": (out.logits["masked_msa"], (slice(None), slice(REAL))),
        "predicted_lddt/logits": (out.logits["plddt"], (slice(REAL),)),
        "experimentally_resolved/logits": (out.logits["experimentally_resolved"], (slice(REAL),)),
        "predicted_aligned_error/logits": (out.logits["predicted_aligned_error"], (slice(REAL), slice(REAL))),
    }
    compared = [name for name in ours if name in expected]
    assert len(compared) >= 4
    for name in compared:
        tensor, real = ours[name]
        assert tensor is not None
        close(tensor[0][real], expected[name][real], 2e-5, name)
    mask = out.structure.mask[0, :REAL] > 0
    error = out.structure.positions[0, :REAL].detach() - torch.from_numpy(
        expected["structure_module/final_atom_positions"][:REAL]
    )
    assert error[mask].abs().max() < 1e-3


def test_two_passes_with_templates(model: AlphaFold, features: dict[str, Tensor], golden: Path) -> None:
    """Catches templates, recycling or heads connected to the wrong tensors."""
    with torch.no_grad():
        agrees(model(features), load(golden / "outputs.npz"))


def test_the_first_pass(model: AlphaFold, features: dict[str, Tensor], golden: Path) -> None:
    """Catches a first pass that is not recycled from zeros."""
    with torch.no_grad():
        agrees(model({k: v[:, :1] for k, v in features.items()}), load(golden / "outputs_iter0.npz"))


def test_losses_and_gradients(
    model: AlphaFold, features: dict[str, Tensor], labels: dict[str, Tensor], golden: Path
) -> None:
    """Catches a loss term with a wrong mask or weight, and a parameter whose gradient is lost or counted twice."""
    expected, gradients = load(golden / "losses.npz"), load(golden / "grads.npz")
    batch = {**features, **labels, "use_clamped_fape": torch.ones(1)}
    model.zero_grad()
    output = model(batch)
    total, terms = total_loss(output, batch, WEIGHTS, CONFIG.heads)
    # AF2 reports the last iteration's backbone FAPE; the total loss contains the mean over iterations.
    last, truth = output.structure.backbone[-1:], Rigid.from_flat12(labels["rigidgroups_gt_frames"][:, :, 0])
    fape = backbone_fape(last, truth, labels["backbone_affine_mask"])
    assert fape.item() == pytest.approx(float(expected["structure_module/fape"]), rel=1e-5)
    for ours, theirs in {
        "sidechain_fape": "structure_module/sidechain_fape",
        "torsion": "structure_module/chi_loss",
        "angle_norm": "structure_module/angle_norm_loss",
        "distogram": "distogram_loss",
        "masked_msa": "masked_msa_loss",
        "pae": "pae_loss",
        "experimentally_resolved": "experimentally_resolved_loss",
    }.items():
        assert terms[ours].item() == pytest.approx(float(expected[theirs]), rel=1e-5), ours
    # The lDDT of a few residues lies on the edge of two bins. Rounding decides which bin is the target, so several
    # values of the loss are correct.
    choices, ours, theirs = plddt_losses(output, labels), terms["plddt"].item(), float(expected["plddt_loss"])
    for plddt in (ours, theirs):
        assert any(choice == pytest.approx(plddt, rel=1e-5) for choice in choices)
    assert total.item() - WEIGHTS.plddt * (ours - theirs) == pytest.approx(float(expected["total_loss"]), rel=1e-5)

    total.backward()
    squares: dict[str, float] = defaultdict(float)
    arrays, parameters = load(golden / "params.npz"), dict(model.named_parameters())
    for name in parameter_names(CONFIG):
        gradient = parameters[name.ours].grad
        assert gradient is not None, name.ours
        widths = [outputs(arrays[key], name.layout, name.block is not None) for key in name.keys]
        for key, part in zip(name.keys, gradient.split(widths), strict=True):
            squares[key] += float(part.double().square().sum())
    norms = {key.removeprefix("norm:"): float(value) for key, value in gradients.items() if key.startswith("norm:")}
    assert set(squares) == set(norms)
    largest = np.sqrt(sum(value**2 for value in norms.values()))
    for key, value in norms.items():
        assert abs(squares[key] ** 0.5 - value) <= 1e-3 * value + 1e-6 * largest, key


def plddt_losses(output: ModelOutput, labels: dict[str, Tensor]) -> list[float]:
    """The pLDDT loss (supplement 1.9.6) for every choice of bins for lDDTs that lie on a bin's edge, up to rounding."""
    truth, mask = labels["all_atom_positions"][0, :, CA], labels["all_atom_mask"][0, :, CA]
    entropies = -output.logits["plddt"][0].detach().log_softmax(-1)  # with each bin as the target
    scores = lddt_ca(output.structure.positions[0, :, CA].detach(), truth, mask, per_residue=True) * entropies.shape[-1]
    edges = ((scores - scores.round()).abs() < 1e-4).logical_and(mask > 0).nonzero().flatten()
    assert len(edges) <= 8, "too many lDDTs on an edge: some choice of their bins would fit any loss"
    losses = []
    for below in itertools.product((0, 1), repeat=len(edges)):
        target = scores.long().index_put(
            (edges,), scores[edges].round().long() - torch.tensor(below, dtype=torch.int64)
        )
        target = target.clamp(0, entropies.shape[-1] - 1)
        losses.append(float((entropies.gather(-1, target.unsqueeze(-1)).squeeze(-1) * mask).sum() / mask.sum()))
    return losses


def outputs(array: np.ndarray, layout: str, stacked: bool) -> int:
    """Number of rows of our matrix that one of DeepMind's arrays fills."""
    shape = array.shape[1:] if stacked else array.shape
    if layout == "vector":
        return int(np.prod(shape))
    return shape[-1] if layout == "output_last" else int(np.prod(shape[1:]))
