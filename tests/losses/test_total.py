"""The total loss: AlphaFold2's end-to-end numbers, weights, batches and missing labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp.config import HeadsConfig, LossConfig
from evodsp.errors import UserError
from evodsp.geometry.frames import Rigid
from evodsp.losses.total import (
    aligned_error_bins,
    cross_entropy,
    distance_bins,
    distogram_loss,
    experimentally_resolved_loss,
    masked_msa_loss,
    pae_loss,
    plddt_loss,
    total_loss,
)
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


_EDGES = HeadsConfig().distogram_min_distance, HeadsConfig().distogram_max_distance


def of_distogram(x: dict[str, Tensor], _: float) -> Tensor:
    return distogram_loss(x["in/logits_distogram"][None], x["pseudo_beta"], x["pseudo_beta_mask"], *_EDGES)


def of_masked_msa(x: dict[str, Tensor], _: float) -> Tensor:
    """(The reference uses the features of the first cycle.)"""
    return masked_msa_loss(x["in/logits_masked_msa"][None], x["true_msa"], x["bert_mask"])


def of_plddt(x: dict[str, Tensor], resolution: float) -> Tensor:
    ca = x["in/final_atom_positions"][None, :, 1], x["all_atom_positions"][:, :, 1], x["all_atom_mask"][:, :, 1]
    return plddt_loss(x["in/logits_predicted_lddt"][None], *ca, torch.tensor([resolution]), 0.1, 3.0)


def of_pae(x: dict[str, Tensor], resolution: float) -> Tensor:
    backbone = Rigid.from_quaternion(x["in/traj"][-1:, :, :4], x["in/traj"][-1:, :, 4:])
    truth, mask = Rigid.from_flat12(x["rigidgroups_gt_frames"][:, :, 0]), x["backbone_affine_mask"]
    logits = x["in/logits_predicted_aligned_error"][None]
    return pae_loss(logits, backbone, truth, mask, torch.tensor([resolution]), 0.1, 3.0)


def of_resolved(x: dict[str, Tensor], resolution: float) -> Tensor:
    logits, atoms = x["in/logits_experimentally_resolved"][None], (x["all_atom_mask"], x["atom37_atom_exists"])
    return experimentally_resolved_loss(logits, *atoms, torch.tensor([resolution]), 0.1, 3.0)


OF_HEADS: dict[str, Callable[[dict[str, Tensor], float], Tensor]] = {
    "distogram_loss": of_distogram,
    "masked_msa_loss": of_masked_msa,
    "plddt_loss": of_plddt,
    "pae_loss": of_pae,
    "experimentally_resolved_loss": of_resolved,
}


@pytest.fixture(scope="module")
def near_native(reference, labels, features) -> dict[str, Tensor]:
    return {**features, **labels, **reference}


@pytest.fixture(scope="module")
def untrained(golden: Path, near_native, losses) -> dict[str, Tensor]:
    """The same with what an untrained model predicts; end to end, test_total has the other heads."""
    out = {key: torch.from_numpy(value) for key, value in load(golden / "outputs.npz").items()}
    logits = {
        f"in/logits_{name}": out[f"{name}/logits"] for name in ("predicted_aligned_error", "experimentally_resolved")
    }
    return {**near_native, **losses, **logits, "in/traj": losses["structure_module/traj"]}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, "near_native") for name in OF_HEADS),
        *((name, "untrained") for name in ("pae_loss", [*OF_HEADS][-1])),
    ],
)
def test_it_is_alphafolds(request, name: str, given: str) -> None:
    """Catches bins off by one, distances that are not squared, frames and points exchanged, an lDDT on a scale of 0 to 100, a
    diagonal that rounding moves into the second bin, and means over unresolved residues, letters that are not masked, padding
    or atom slots that a residue does not have."""
    x = request.getfixturevalue(given)
    torch.testing.assert_close(OF_HEADS[name](x, 2.0)[0], x[name].float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("resolution", "counts"), [(0.0, False), (0.1, True), (3.0, True), (3.01, False)])
@pytest.mark.parametrize("name", ["plddt_loss", "pae_loss", "experimentally_resolved_loss"])
def test_confidence_counts_within_the_resolution_bounds(
    near_native, name: str, resolution: float, counts: bool
) -> None:
    """Catches a head trained on NMR or predicted structures (resolution 0, every atom) or on maps of low resolution."""
    assert (OF_HEADS[name](near_native, resolution).item() > 0) == counts


def test_distance_bins_at_the_boundaries() -> None:
    """Catches bins closed at the wrong end: a distance equal to a boundary belongs to the lower bin."""
    boundaries = torch.linspace(2.0, 8.0, 4, dtype=torch.float64)  # exactly 2, 4, 6, 8
    distances = torch.tensor([0.0, 2.0, 2.1, 4.0, 7.9, 8.0, 8.1, 1000.0], dtype=torch.float64)
    positions = torch.stack([distances, torch.zeros(8), torch.zeros(8)], dim=-1).double()[None]
    bins = distance_bins(positions, len(boundaries) + 1, 2.0, 8.0)
    assert bins[0, 0].tolist() == [0, 0, 1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(bins, bins.mT)


def test_samples_without_targets_give_zero_and_do_not_touch_others() -> None:
    """Catches 0 / 0, and a mean over the whole batch instead of one per sample."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 23, generator=generator)
    letters = torch.randint(0, 22, (2, 3, 4), generator=generator, dtype=torch.int32)
    mask = torch.ones(2, 3, 4)
    mask[0] = 0
    loss = masked_msa_loss(logits, letters, mask)
    assert loss[0].item() == 0
    torch.testing.assert_close(loss[1:], masked_msa_loss(logits[1:], letters[1:], mask[1:]))


def test_logarithms_are_taken_in_float32() -> None:
    """Catches a logarithm taken in bfloat16, whose spacing near 4 is 0.03, and that of a sigmoid that was rounded to zero."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    loss = cross_entropy(logits, torch.arange(5))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -logits.float().log_softmax(-1)[torch.arange(5), torch.arange(5)])
    ones, certain = torch.ones(1, 2, 37), torch.full((1, 2, 37), 500.0, dtype=torch.bfloat16)
    loss = experimentally_resolved_loss(certain, 1 - ones, ones, torch.tensor([2.0]), 0.1, 3.0)
    assert loss.item() == pytest.approx(500)
    assert loss.dtype == torch.float32


def test_perfect_prediction_falls_in_the_last_bin(near_native) -> None:
    """Catches an lDDT of exactly 1 that falls beyond the last bin."""
    certain = torch.zeros_like(near_native["in/logits_predicted_lddt"])
    certain[..., -1] = 50
    perfect = {"in/logits_predicted_lddt": certain, "in/final_atom_positions": near_native["all_atom_positions"][0]}
    assert of_plddt({**near_native, **perfect}, 2.0).item() < 1e-6


def test_aligned_error_bins_know_frame_from_point(labels) -> None:
    """Catches a transposed error: turning a residue about its CA changes the errors in its frame, not the errors of its CA."""
    truth = Rigid.from_flat12(labels["rigidgroups_gt_frames"][:, :6, 0])
    half_turn = torch.tensor([-1.0, -1.0, 1.0])
    rotation = truth.rotation.clone()
    rotation[:, 2] = rotation[:, 2] * half_turn
    bins = aligned_error_bins(Rigid(rotation, truth.translation), truth, 64)
    changed = bins > 1  # rounding errors alone reach bin 1
    assert changed[0, 2].sum() == 5
    assert not changed[0, [0, 1, 3, 4, 5]].any()
    assert not bins.diagonal(dim1=1, dim2=2).any()
