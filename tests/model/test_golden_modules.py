"""Each module, and the model without templates, against DeepMind's AlphaFold2: outputs and gradients, with padding in masks.

Tolerance in fp32: 2e-5 of the largest element; 1e-4 for gradients, by which two public implementations differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evodsp.config import EvoformerConfig, ModelConfig, StructureModuleConfig, TemplateConfig
from evodsp.geometry.frames import Rigid, frames_to_atom14, pseudo_beta, torsion_angles_to_frames
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.layers import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
    OuterProductMean,
    TriangleAttention,
    TriangleMultiplication,
)
from evodsp.model.primitives import Transition
from evodsp.model.sharded import Added, Sharded
from evodsp.model.structure_module import InvariantPointAttention, PairRows, StructureModule
from evodsp.model.templates import (
    TemplateEmbedder,
    TemplatePairStack,
    TemplatePointwiseAttention,
    Templates,
    TemplateTorsionEmbedder,
    template_torsion_features,
)
from evodsp.weights import names
from evodsp.weights.deepmind import load_arrays
from evodsp.weights.names import Name, Prefix
from tests.builders.golden import Holder, close
from tests.shared import load

BLOCK = "evoformer/evoformer_iteration"
EXTRA = "evoformer/extra_msa_stack"
SIZES = EvoformerConfig(checkpoint=False)
EXTRA_SIZES = EvoformerConfig(msa_head_width=8, checkpoint=False)
SCOPE = "evoformer/template_embedding"
TEMPLATE_STACK = f"{SCOPE}/single_template_embedding/{names.TEMPLATE_STACK['monomer']}"
OF_TEMPLATES = TemplateConfig(blocks=1, checkpoint=False)
Module = TypeVar("Module", bound=nn.Module)

Tensors = dict[str, Tensor]


def msa(x: Tensors) -> Sharded:
    return Sharded.whole(x["m"], "res", x["msa_mask"])


def pair(x: Tensors) -> Sharded:
    return Sharded.whole(x["z"], "j", x.get("pair_mask", torch.ones(x["z"].shape[:3])))


def of_msa(module: nn.Module, x: Tensors) -> Tensor:
    return module(msa(x)).x


def of_pair(module: nn.Module, x: Tensors) -> Tensor:
    update = module(pair(x))
    return update.function(x["z"]) - x["z"] if isinstance(update, Added) else update.x


def of_both(module: nn.Module, x: Tensors) -> tuple[Tensor, Tensor]:
    return module(x["m"], x["z"], x["msa_mask"], x["pair_mask"])


def first_of(rows: Callable[..., Iterable[Name]], path: str, **options: bool) -> list[Name]:
    """The rows of a module's parameters in the first block."""
    return [Name(row.ours, row.deepmind, row.layout, block=0) for row in rows(Prefix("x", path), **options)]


# Module, its rows in the table of parameter names, and how it is called.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterable[Name]], Callable[[Any, Tensors], Any]]] = {
    "msa_row_attention_with_pair_bias": (
        lambda: MSARowAttention(256, 128, 8, 32),
        lambda: first_of(names.row_attention, f"{BLOCK}/msa_row_attention_with_pair_bias"),
        lambda module, x: module(msa(x), module.bias(pair(x))).x,
    ),
    "msa_column_attention": (
        lambda: MSAColumnAttention(256, 8, 32),
        lambda: first_of(names.column_attention, f"{BLOCK}/msa_column_attention"),
        of_msa,
    ),
    "msa_column_global_attention": (
        lambda: MSAColumnGlobalAttention(64, 8, 8),
        lambda: first_of(names.global_attention, f"{EXTRA}/msa_column_global_attention"),
        of_msa,
    ),
    "msa_transition": (
        lambda: Transition(256, 4),
        lambda: first_of(names.transition, f"{BLOCK}/msa_transition"),
        of_msa,
    ),
    "pair_transition": (
        lambda: Transition(128, 4),
        lambda: first_of(names.transition, f"{BLOCK}/pair_transition"),
        of_pair,
    ),
    "outer_product_mean": (
        lambda: OuterProductMean(256, 128, 32),
        lambda: first_of(names.outer_product_mean, f"{BLOCK}/outer_product_mean"),
        of_msa,
    ),
    **{
        f"{prefix}triangle_multiplication_{edges}": (
            lambda edges=edges: TriangleMultiplication(128, 128, edges),
            lambda edges=edges: first_of(names.triangle_multiplication, f"{BLOCK}/triangle_multiplication_{edges}"),
            of_pair,
        )
        for edges in ("outgoing", "incoming")
        for prefix in ("", "fused_")
    },
    **{
        f"triangle_attention_{node}_node": (
            lambda node=node: TriangleAttention(128, 4, 32, node),
            lambda node=node: first_of(names.triangle_attention, f"{BLOCK}/triangle_attention_{node}_node"),
            of_pair,
        )
        for node in ("starting", "ending")
    },
    "evoformer_block": (
        lambda: EvoformerBlock(256, 128, SIZES),
        lambda: first_of(names.evoformer_block, BLOCK),
        of_both,
    ),
    "extra_msa_block": (
        lambda: EvoformerBlock(64, 128, EXTRA_SIZES, extra=True),
        lambda: first_of(names.evoformer_block, EXTRA, extra=True),
        of_both,
    ),
    **{
        f"template_pair_stack{suffix}": (
            lambda again=again: TemplatePairStack(replace(OF_TEMPLATES, checkpoint=again)),
            lambda: names.template_pair_stack(Prefix("x", TEMPLATE_STACK), 1),
            lambda module, x: module(x["t"], x["pair_mask"]),
        )
        for suffix, again in (("", False), (" recomputed", True))
    },
    "template_pointwise_attention": (
        lambda: TemplatePointwiseAttention(128, OF_TEMPLATES),
        lambda: names.template_pointwise_attention(Prefix("x", f"{SCOPE}/attention")),
        lambda module, x: module(x["t"], x["z"], x["template_mask"]),
    ),
    "template_embedding": (
        lambda: TemplateEmbedder(128, OF_TEMPLATES),
        lambda: names.template_embedder(Prefix("x", SCOPE), OF_TEMPLATES),
        lambda module, x: module(Sharded.whole(x["z"], "j", x["mask_2d"]), Templates.from_features(x)).x,
    ),
}


def loaded(module: Module, rows: Iterable[Name], golden: Path) -> Module:
    """The module with all its parameters from DeepMind's arrays."""
    rows = list(rows)
    load_arrays(Holder(module), rows, load(golden / "params.npz"))
    assert {name for name, _ in Holder(module).named_parameters()} == {row.ours for row in rows}
    return module


def batched(data: Mapping[str, np.ndarray]) -> Tensors:
    """The module's inputs with a batch axis of one; those whose gradient is known require one."""
    x = {k.removeprefix("in/"): torch.from_numpy(v).unsqueeze(0) for k, v in data.items() if k.startswith("in/")}
    return {k: v.requires_grad_() if f"grad/{k}" in data else v for k, v in x.items()}


@pytest.mark.parametrize("case", sorted(CASES))
def test_module_matches_alphafold(case: str, golden: Path) -> None:
    """Catches a transposed axis, a wrong mask, scale or bias, wrong gradients, and an order of sub-layers that is not a stack's
    own; of templates attention along residues, a gate that AF2 does not have, a wrong order of the 88 features, and gaps
    treated as neighbours."""
    build, rows, call = CASES[case]
    data = load(golden / "modules" / f"{case.partition(' ')[0]}.npz")
    module, x = loaded(build(), rows(), golden), batched(data)
    outputs = call(module, x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    keys = ("msa", "pair") if len(outputs) == 2 else ("out",)
    for key, output in zip(keys, outputs, strict=True):
        valid = np.abs(data[f"cot/{key}"]).sum(-1, keepdims=True) > 0  # cotangents are zero on padding
        close(output[0].detach().numpy() * valid, data[f"out/{key}"] * valid, 2e-5, key)
    cotangents = [torch.from_numpy(data[f"cot/{key}"]).unsqueeze(0) for key in keys]
    wanted = {name: tensor for name, tensor in x.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), cotangents)
    for name, gradient in zip(wanted, gradients, strict=True):
        close(gradient[0], data[f"grad/{name}"], 1e-4, f"gradient of {name}")


def test_embedders_match_alphafold(golden: Path) -> None:
    """Catches a wrong order of features, wrong clipping of relative positions, and wrong recycled distance bins."""
    data = {k: torch.from_numpy(v) for k, v in load(golden / "modules" / "input_and_recycling_embedding.npz").items()}
    config = ModelConfig(
        evoformer=EvoformerConfig(blocks=0),
        extra_msa=EvoformerConfig(blocks=0),
        structure_module=StructureModuleConfig(),
    )
    model = AlphaFold(config)
    load_arrays(model, names.embedders("evoformer"), load(golden / "params.npz"))
    x = {k.removeprefix("in/"): v.unsqueeze(0) for k, v in data.items() if k.startswith("in/")}
    m_input = model.input_embedder.msa_representation(x["target_feat"], x["msa_feat"])
    z_input = model.input_embedder.pair_representation(x)
    previous_row, previous_pair = (x[k].requires_grad_() for k in ("prev_msa_first_row", "prev_pair"))
    beta = pseudo_beta(x["aatype"], x["prev_pos"], None)
    row = model.recycling_embedder.msa_norm(previous_row)
    pair = model.recycling_embedder.pair_update(previous_pair, beta)
    m, z = m_input.clone(), z_input + pair
    m[:, 0] += row
    for name, value in (("m_input", m_input), ("z_input", z_input), ("m", m), ("z", z)):
        close(value[0], data[f"out/{name}"].numpy(), 2e-5, name)
    bins = model.recycling_embedder.distogram(beta)
    close(bins[0], data["out/prev_dgram"].numpy(), 0.0, "prev_dgram")
    cotangents = [data["cot/m"].unsqueeze(0), data["cot/z"].unsqueeze(0)]
    gradients = torch.autograd.grad((m, z), (previous_row, previous_pair), cotangents)
    close(gradients[0][0], data["grad/prev_msa_first_row"].numpy(), 1e-4, "gradient of prev_msa_first_row")
    close(gradients[1][0], data["grad/prev_pair"].numpy(), 1e-4, "gradient of prev_pair")


LAYER = "structure_module/fold_iteration"


def test_invariant_point_attention(golden: Path) -> None:
    """Catches a wrong order of point coordinates, a wrong scale of a logit term, and cancellation in distances."""
    data = load(golden / "modules" / "invariant_point_attention.npz")
    table = names.invariant_point_attention(Prefix("x", f"{LAYER}/invariant_point_attention"))
    module, x = loaded(InvariantPointAttention(384, 128, StructureModuleConfig()), table, golden), batched(data)
    s, z, affine = (x[k] for k in ("s", "z", "affine"))
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
    rows = names.structure_module(Prefix("x", "structure_module"), config)
    module, x = loaded(StructureModule(384, 128, config.structure_module), rows, golden), batched(data)
    s, z = x["s"], x["z"]
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


def test_torsion_rows_match_alphafold(golden: Path) -> None:
    """Catches masked undefined angles (AF2 does not mask them), swapped atom names, and a row mask other than psi's."""
    data = load(golden / "modules" / "template_single_embedding.npz")
    module = loaded(TemplateTorsionEmbedder(256), names.template_torsion_embedder(Prefix("x", "evoformer")), golden)
    templates = Templates.from_features(batched(data))
    rows, mask = module(module.features(templates))
    close(template_torsion_features(templates)[0], data["out/template_angle_feat"], 2e-5, "features")
    close(rows[0], data["out/template_rows"], 2e-5, "rows")
    close(mask[0], data["out/template_rows_mask"], 0.0, "mask")


def test_every_template_parameter_of_the_file_has_a_name(golden: Path) -> None:
    """Catches an array in DeepMind's file that nothing reads."""
    rows = [
        *names.template_embedder(Prefix("x", SCOPE), OF_TEMPLATES),
        *names.template_torsion_embedder(Prefix("x", "evoformer")),
    ]
    read = [key for row in rows for key in row.keys]
    assert len(read) == len(set(read))
    assert set(read) == {key for key in load(golden / "params.npz") if "/template_" in key}
