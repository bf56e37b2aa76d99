"""The total loss: AlphaFold2's end-to-end numbers, weights, batches and missing labels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp.config import HeadsConfig, LossConfig
from evodsp.errors import UserError
from evodsp.geometry.frames import Rigid
from evodsp.losses.total import distogram_loss, pae_loss, total_loss
from evodsp.model.heads import ModelOutput, StructureOutput
from tests.shared import load

_NAMES = {
    "sidechain_fape": "structure_module/sidechain_fape",
    "torsion": "structure_module/chi_loss",
    "angle_norm": "structure_module/angle_norm_loss",
    "distogram": "distogram_loss",
    "masked_msa": "masked_msa_loss",
    "plddt": "plddt_loss",
}
_WEIGHTS = (*_NAMES, "backbone_fape")
_HEADS = HeadsConfig()


def _only(*names: str, **changes: object) -> LossConfig:
    """Weights that are 1 for the named terms and 0 for the others."""
    weights = {name: float(name in names) for name in _WEIGHTS}
    return dataclasses.replace(LossConfig(), **weights, **changes)


@pytest.fixture(scope="module")
def losses(golden: Path) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in load(golden / "losses.npz").items()}


@pytest.fixture(scope="module")
def output(golden: Path, losses) -> ModelOutput:
    """The reference's model output, as a batch of one sample."""
    out = {key: torch.from_numpy(value)[None] for key, value in load(golden / "outputs.npz").items()}
    trajectory = losses["structure_module/traj"][:, None]
    structure = StructureOutput(
        backbone=Rigid.from_quaternion(trajectory[..., :4], trajectory[..., 4:]),
        angles=losses["sidechains_angles_sin_cos"][:, None],
        unnormalized_angles=losses["sidechains_unnormalized_angles_sin_cos"][:, None],
        frames=Rigid.from_flat12(losses["sidechains_frames_flat12"][-1:]),
        atom14=losses["sidechains_atom_pos"][-1:],
        positions=out["structure_module/final_atom_positions"],
        mask=out["structure_module/final_atom_mask"],
        single=out["representations/structure_module"],
    )
    return ModelOutput(
        {
            "msa": out["representations/msa"], "first_row": out["representations/msa"][:, 0],
            "pair": out["representations/pair"], "single": out["representations/single"],
        },
        structure,
        {
            "distogram": out["distogram/logits"], "masked_msa": out["masked_msa/logits"],
            "plddt": out["predicted_lddt/logits"],
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch(golden: Path) -> dict[str, Tensor]:
    """Features [1, cycle, ...] and labels [1, ...]."""
    files = (load(golden / name) for name in ("features_processed.npz", "labels.npz"))
    return {key: torch.from_numpy(value)[None] for file in files for key, value in file.items()}


def _stack(first: object, second: object) -> object:
    """Combine two batches of one into a batch of two. The batch is the second axis of the structure module's trajectories."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    if isinstance(first, StructureOutput):
        values = {}
        for field in dataclasses.fields(first):
            a, b = getattr(first, field.name), getattr(second, field.name)
            dim = 1 if field.name in ("backbone", "angles", "unnormalized_angles") else 0
            if isinstance(a, Rigid):
                rotation = torch.cat([a.rotation, b.rotation], dim)
                values[field.name] = Rigid(rotation, torch.cat([a.translation, b.translation], dim))
            else:
                values[field.name] = torch.cat([a, b], dim)
        return StructureOutput(**values)
    if isinstance(first, dict):
        return {name: _stack(value, second[name]) for name, value in first.items()}
    if first is None:  # no stop tolerance was given
        return None
    fields = [field.name for field in dataclasses.fields(first)]
    return type(first)(**{name: _stack(getattr(first, name), getattr(second, name)) for name in fields})


def test_every_term_is_alphafolds_end_to_end(output, batch, losses) -> None:
    """Catches a term that reads the wrong tensor, label or recycling iteration's features."""
    _, breakdown = total_loss(output, batch, LossConfig(), _HEADS)
    assert list(breakdown) == ["backbone_fape", "sidechain_fape", *list(_NAMES)[1:], "total"]
    for name, key in _NAMES.items():
        # One of 60 residues has an lDDT of 0.1, a bin's edge: rounding decides its bin. test_confidence has a tight tolerance.
        rtol = 1e-2 if name == "plddt" else 1e-5
        torch.testing.assert_close(breakdown[name], losses[key], rtol=rtol, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    structure = dataclasses.replace(output.structure, backbone=output.structure.backbone[-1:])
    _, of_last = total_loss(dataclasses.replace(output, structure=structure), batch, _only("backbone_fape"), _HEADS)
    torch.testing.assert_close(of_last["backbone_fape"], losses["structure_module/fape"], rtol=1e-5, atol=0)


def test_ranges_of_bins_are_those_of_the_heads(output, batch) -> None:
    """Catches AlphaFold2's range of distances, or of aligned errors, in the losses of a model that has another one."""
    logits = torch.randn(1, 72, 72, 12, generator=torch.Generator().manual_seed(0))
    given = dataclasses.replace(output, logits={**output.logits, "predicted_aligned_error": logits})
    heads = HeadsConfig(
        predicted_aligned_error=True,
        pae_bins=12,
        pae_max_error=9.0,
        distogram_min_distance=4.0,
        distogram_max_distance=12.0,
    )
    of_pae = {"confidence_min_resolution": 0.0, "confidence_max_resolution": 100.0}
    _, found = total_loss(given, batch, dataclasses.replace(_only("distogram", **of_pae), pae=1.0), heads)
    labels, backbone = [batch[name] for name in ("pseudo_beta", "pseudo_beta_mask")], output.structure.backbone[-1]
    truth, mask = Rigid.from_flat12(batch["rigidgroups_gt_frames"][:, :, 0]), batch["backbone_affine_mask"]
    distogram = distogram_loss(output.logits["distogram"], *labels, 4.0, 12.0)
    pae = pae_loss(logits, backbone, truth, mask, batch["resolution"], 0.0, 100.0, 9.0)
    torch.testing.assert_close(found["distogram"], distogram.mean())
    torch.testing.assert_close(found["pae"], pae.mean())


def test_total_is_the_weighted_sum_times_root_of_residues(output, batch) -> None:
    """Catches a forgotten weight, padding counted as residues, and a breakdown that already contains the weights."""
    config = LossConfig()
    total, breakdown = total_loss(output, batch, config, _HEADS)
    expected = sum(getattr(config, name) * breakdown[name] for name in _WEIGHTS)
    torch.testing.assert_close(total, expected * 64**0.5)
    torch.testing.assert_close(breakdown["total"], total)
    unscaled, _ = total_loss(output, batch, dataclasses.replace(config, scale_by_length=False), _HEADS)
    torch.testing.assert_close(unscaled, expected)


def test_batch_is_the_mean_of_its_samples(output, batch) -> None:
    """Catches terms pooled over the batch: each sample has its own masks, length, resolution and clamping."""
    other_batch = {key: value.clone() for key, value in batch.items()}
    masks = (
        "backbone_affine_mask",
        "rigidgroups_gt_exists",
        "atom14_gt_exists",
        "pseudo_beta_mask",
        "torsion_angles_mask",
    )
    for key in masks:
        other_batch[key][:, 30:] = 0
    other_batch["seq_mask"][:, :, 50:] = 0
    other_batch["resolution"] += 5
    batches = [{**b, "use_clamped_fape": torch.tensor([c])} for b, c in ((batch, 1.0), (other_batch, 0.0))]
    singles = [total_loss(output, b, LossConfig(), _HEADS) for b in batches]
    both = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    total, breakdown = total_loss(_stack(output, output), both, LossConfig(), _HEADS)
    torch.testing.assert_close(total, (singles[0][0] + singles[1][0]) / 2)
    for name in breakdown:
        torch.testing.assert_close(breakdown[name], (singles[0][1][name] + singles[1][1][name]) / 2)


def test_samples_choose_whether_backbone_fape_is_clamped(output, batch) -> None:
    """Catches `use_clamped_fape` ignored or inverted. Without it the error is clamped."""
    values = []
    for clamped in ({}, {"use_clamped_fape": torch.ones(1)}, {"use_clamped_fape": torch.zeros(1)}):
        values.append(total_loss(output, {**batch, **clamped}, _only("backbone_fape"), _HEADS)[1]["backbone_fape"])
    assert values[0] == values[1] <= 1 < values[2]


def test_terms_of_weight_zero_need_no_labels_and_are_not_reported(output, batch) -> None:
    """Catches terms of weight zero that are computed, or that require labels."""
    features = {key: batch[key] for key in ("true_msa", "bert_mask", "seq_mask")}
    _, breakdown = total_loss(output, features, _only("masked_msa"), _HEADS)
    assert list(breakdown) == ["masked_msa", "total"]


def test_missing_labels_are_named_in_one_line(output, batch) -> None:
    """Catches a KeyError for a user who trains on chains without structures."""
    lacking = {key: value for key, value in batch.items() if key not in ("all_atom_positions", "pseudo_beta")}
    with pytest.raises(UserError, match=r"all_atom_positions, pseudo_beta.*distogram, plddt.*weights to 0") as error:
        total_loss(output, lacking, LossConfig(), _HEADS)
    assert "\n" not in str(error.value)


def test_gradient_reaches_every_output_and_the_breakdown_holds_none(output, batch) -> None:
    """Catches a detached term, and a breakdown that keeps the graph alive when it is logged."""
    structure = output.structure
    leaves = {
        "backbone": structure.backbone.translation, "angles": structure.angles, "norm": structure.unnormalized_angles,
        "frames": structure.frames.translation, "atom14": structure.atom14, "distogram": output.logits["distogram"],
        "msa": output.logits["masked_msa"], "plddt": output.logits["plddt"],
    }  # fmt: skip
    leaves = {key: value.clone().requires_grad_() for key, value in leaves.items()}
    differentiable = dataclasses.replace(
        output,
        logits={"distogram": leaves["distogram"], "masked_msa": leaves["msa"], "plddt": leaves["plddt"]},
        structure=dataclasses.replace(
            structure, backbone=Rigid(structure.backbone.rotation, leaves["backbone"]), angles=leaves["angles"],
            unnormalized_angles=leaves["norm"], frames=Rigid(structure.frames.rotation, leaves["frames"]),
            atom14=leaves["atom14"],
        ),
    )  # fmt: skip
    total, breakdown = total_loss(differentiable, batch, LossConfig(), _HEADS)
    total.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert torch.isfinite(leaf.grad).all(), name
        assert leaf.grad.abs().sum() > 0, name
    assert not any(value.requires_grad for value in breakdown.values())


@pytest.mark.parametrize(("term", "head"), [("pae", "predicted_aligned_error"), ("experimentally_resolved",) * 2])
def test_a_term_whose_head_is_missing_is_named(output, batch, term: str, head: str) -> None:
    """Catches a weight that is ignored because the model lacks the term's head."""
    with pytest.raises(UserError, match=f"loss.{term} is not 0.*heads.{head}"):
        total_loss(output, batch, dataclasses.replace(LossConfig(), **{term: 0.1}), _HEADS)
