"""The structure module, and the model without templates, against DeepMind's AlphaFold2."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from evodsp.config import EvoformerConfig, ModelConfig, StructureModuleConfig
from evodsp.geometry.frames import Rigid, frames_to_atom14, torsion_angles_to_frames
from evodsp.model.alphafold import AlphaFold
from evodsp.model.structure_module import InvariantPointAttention, PairRows, StructureModule
from evodsp.weights import names
from evodsp.weights.deepmind import load_arrays
from evodsp.weights.names import Prefix
from tests.builders.golden import Holder, close
from tests.shared import load

LAYER = "structure_module/fold_iteration"


def test_invariant_point_attention(golden: Path) -> None:
    """Catches a wrong order of point coordinates, a wrong scale of a logit term, and cancellation in distances."""
    data = load(golden / "modules" / "invariant_point_attention.npz")
    module = InvariantPointAttention(384, 128, StructureModuleConfig())
    table = names.invariant_point_attention(Prefix("x", f"{LAYER}/invariant_point_attention"))
    load_arrays(Holder(module), table, load(golden / "params.npz"))
    x = {k.removeprefix("in/"): torch.from_numpy(v).unsqueeze(0) for k, v in data.items() if k.startswith("in/")}
    s, z, affine = (x[k].requires_grad_() for k in ("s", "z", "affine"))
    frames = Rigid.from_quaternion(affine[..., :4], affine[..., 4:])
    rows = PairRows.whole(z)
    out = module(s, rows, module.shared(rows, x["seq_mask"]), frames)
    valid = (x["seq_mask"][0, :, None] > 0).numpy()
    close(out[0].detach().numpy() * valid, data["out/out"] * valid, 2e-5, "out")
    cotangent = torch.from_numpy(data["cot/out"]).unsqueeze(0)
    gradients = torch.autograd.grad(out, (s, z, affine), cotangent)
    close(gradients[0][0], data["grad/s"], 1e-4, "gradient of s")
    close(gradients[1][0], data["grad/z"], 1e-4, "gradient of z")
    # Only the tangential part of the quaternion's gradient is defined, so this compares the translation's gradient.
    close(gradients[2][0, :, 4:], data["grad/affine"][:, 4:], 1e-4, "gradient of the translation")


def to_affine(frames: Rigid, like: Tensor) -> Tensor:
    """Quaternion (with the sign of `like`) and translation of frames: AF2's output, to which the cotangents belong."""
    r = frames.rotation
    w = (1 + r[..., 0, 0] + r[..., 1, 1] + r[..., 2, 2]).sqrt() / 2
    vector = [r[..., 2, 1] - r[..., 1, 2], r[..., 0, 2] - r[..., 2, 0], r[..., 1, 0] - r[..., 0, 1]]
    quaternion = torch.stack([w, *(part / (4 * w) for part in vector)], -1)
    sign = (quaternion * like).sum(-1, keepdim=True).sign()
    return torch.cat([quaternion * sign, frames.translation], -1)


def test_structure_module(golden: Path) -> None:
    """Catches a wrong order of updates, wrong normalisations, units or angles, and atoms placed by the wrong group."""
    data = load(golden / "modules" / "structure_module.npz")
    config = ModelConfig(structure_module=StructureModuleConfig(iterations=3))
    module = StructureModule(384, 128, config.structure_module)
    load_arrays(
        Holder(module), names.structure_module(Prefix("x", "structure_module"), config), load(golden / "params.npz")
    )
    x = {k.removeprefix("in/"): torch.from_numpy(v).unsqueeze(0) for k, v in data.items() if k.startswith("in/")}
    s, z = (x[k].requires_grad_() for k in ("s", "z"))
    out = module(s, z, x["aatype"], x["seq_mask"])
    # Atoms of every iteration, as AF2 computes them; only this test needs them.
    groups = torsion_angles_to_frames(out.backbone, out.angles, x["aatype"].expand(3, 1, -1))
    atom14 = frames_to_atom14(groups, x["aatype"].expand(3, 1, -1))
    quaternions = torch.from_numpy(data["out/traj"][..., :4]).unsqueeze(1)
    trajectory = Rigid.from_quaternion(quaternions, torch.from_numpy(data["out/traj"][..., 4:]).unsqueeze(1))
    valid = x["seq_mask"][0] > 0
    compared = {
        "act": (out.single[0], data["out/act"]),
        "angles": (out.angles[:, 0], data["out/angles_sin_cos"]),
        "raw angles": (out.unnormalized_angles[:, 0], data["out/unnormalized_angles_sin_cos"]),
        "atom14": (atom14[:, 0], data["out/atom14_pos"]),
        "frames": (groups.to_flat12()[:, 0], data["out/frames_flat12"]),
        "backbone": (out.backbone.to_flat12()[:, 0], trajectory.to_flat12()[:, 0].numpy()),
    }
    for name, (ours, theirs) in compared.items():
        rows = (valid if ours.shape[0] == len(valid) else valid.expand(3, -1)).numpy()
        close(ours.detach().numpy()[rows], theirs[rows], 2e-5, name)
    close(out.atom14[0].detach().numpy()[valid], data["out/atom14_pos"][-1][valid], 2e-5, "last atom14")
    atom37 = x["atom37_atom_exists"][0, ..., None].numpy() * valid[:, None, None].numpy()
    close(out.positions[0].detach().numpy() * atom37, data["out/final_atom_positions"] * atom37, 2e-5, "atom37")

    # Cotangents reach every output of every iteration; they are zero on padding.
    outputs = {
        "act": out.single[0], "angles_sin_cos": out.angles[:, 0], "atom14_pos": atom14[:, 0],
        "frames_flat12": groups.to_flat12()[:, 0], "unnormalized_angles_sin_cos": out.unnormalized_angles[:, 0],
        "final_atom_positions": out.positions[0], "traj": to_affine(out.backbone, quaternions)[:, 0],
    }  # fmt: skip
    loss = sum((outputs[k] * torch.from_numpy(data[f"cot/{k}"])).sum() for k in outputs)
    gradients = torch.autograd.grad(loss, (s, z))
    close(gradients[0][0], data["grad/s"], 1e-4, "gradient of s")
    close(gradients[1][0], data["grad/z"], 1e-4, "gradient of z")


def test_model_without_templates(golden: Path) -> None:
    """Catches embedders, stacks or recycling connected wrongly: model_5_ptm, two cycles, real features."""
    expected = load(golden / "outputs_model_5_ptm.npz")
    features = {k: torch.from_numpy(v).unsqueeze(0) for k, v in load(golden / "features_processed.npz").items()}
    config = dataclasses.replace(
        ModelConfig.preset("model_5_ptm"),
        evoformer=EvoformerConfig(blocks=2),
        extra_msa=EvoformerConfig(blocks=1, msa_head_width=8),
        structure_module=StructureModuleConfig(iterations=2),
    )
    model = AlphaFold(config).eval()
    rows = names.parameter_names(config)
    assert sorted(row.ours for row in rows) == sorted(name for name, _ in model.named_parameters())
    load_arrays(model, rows, load(golden / "params.npz"))
    with torch.no_grad():
        out = model(features)
    real = 64
    close(out.representations["single"][0, :real], expected["representations/single"][:real], 2e-5, "single")
    close(out.representations["pair"][0, :real, :real], expected["representations/pair"][:real, :real], 2e-5, "pair")
    close(out.logits["plddt"][0, :real], expected["predicted_lddt/logits"][:real], 2e-5, "pLDDT logits")
    positions = expected["structure_module/final_atom_positions"][:real]
    mask = out.structure.mask[0, :real, :, None].numpy()
    assert abs(out.structure.positions[0, :real].numpy() - positions)[mask[..., 0] > 0].max() < 1e-3  # Å
