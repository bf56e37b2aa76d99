"""Each module against DeepMind's AlphaFold2: outputs and gradients, with padding in every mask.

Tolerance in fp32: 2e-5 of the largest element; 1e-4 for gradients, by which two public implementations differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from evodsp.config import EvoformerConfig, ModelConfig, StructureModuleConfig
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
from evodsp.model.sharded import Added, Made, Sharded
from evodsp.weights import names
from evodsp.weights.deepmind import load_arrays
from evodsp.weights.names import Name, Prefix
from tests.builders.golden import Holder, close
from tests.shared import load

BLOCK = "evoformer/evoformer_iteration"
EXTRA = "evoformer/extra_msa_stack"
SIZES = EvoformerConfig(checkpoint=False)
EXTRA_SIZES = EvoformerConfig(msa_head_width=8, checkpoint=False)

# Module, its rows in the table of parameter names, its inputs in order.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterable[Name]], tuple[str, ...]]] = {
    "msa_row_attention_with_pair_bias": (
        lambda: MSARowAttention(256, 128, 8, 32),
        lambda: names.row_attention(Prefix("x", f"{BLOCK}/msa_row_attention_with_pair_bias")),
        ("m", "z", "msa_mask"),
    ),
    "msa_column_attention": (
        lambda: MSAColumnAttention(256, 8, 32),
        lambda: names.column_attention(Prefix("x", f"{BLOCK}/msa_column_attention")),
        ("m", "msa_mask"),
    ),
    "msa_column_global_attention": (
        lambda: MSAColumnGlobalAttention(64, 8, 8),
        lambda: names.global_attention(Prefix("x", f"{EXTRA}/msa_column_global_attention")),
        ("m", "msa_mask"),
    ),
    "msa_transition": (
        lambda: Transition(256, 4),
        lambda: names.transition(Prefix("x", f"{BLOCK}/msa_transition")),
        ("m",),
    ),
    "pair_transition": (
        lambda: Transition(128, 4),
        lambda: names.transition(Prefix("x", f"{BLOCK}/pair_transition")),
        ("z",),
    ),
    "outer_product_mean": (
        lambda: OuterProductMean(256, 128, 32),
        lambda: names.outer_product_mean(Prefix("x", f"{BLOCK}/outer_product_mean")),
        ("m", "msa_mask"),
    ),
    **{
        f"{prefix}triangle_multiplication_{edges}": (
            lambda edges=edges: TriangleMultiplication(128, 128, edges),
            lambda edges=edges: names.triangle_multiplication(Prefix("x", f"{BLOCK}/triangle_multiplication_{edges}")),
            ("z", "pair_mask"),
        )
        for edges in ("outgoing", "incoming")
        for prefix in ("", "fused_")
    },
    **{
        f"triangle_attention_{node}_node": (
            lambda node=node: TriangleAttention(128, 4, 32, node),
            lambda node=node: names.triangle_attention(Prefix("x", f"{BLOCK}/triangle_attention_{node}_node")),
            ("z", "pair_mask"),
        )
        for node in ("starting", "ending")
    },
    "evoformer_block": (
        lambda: EvoformerBlock(256, 128, SIZES),
        lambda: names.evoformer_block(Prefix("x", BLOCK)),
        ("m", "z", "msa_mask", "pair_mask"),
    ),
    "extra_msa_block": (
        lambda: EvoformerBlock(64, 128, EXTRA_SIZES, extra=True),
        lambda: names.evoformer_block(Prefix("x", EXTRA), extra=True),
        ("m", "z", "msa_mask", "pair_mask"),
    ),
}


def representations(tensors: dict[str, torch.Tensor]) -> list[Sharded]:
    """What a sub-layer takes: m and z with their masks, on one device."""
    found = []
    for name, axis, mask_name in (("m", "res", "msa_mask"), ("z", "j", "pair_mask")):
        if name in tensors:
            x = tensors[name]
            found.append(Sharded.whole(x, axis, tensors.get(mask_name, torch.ones(x.shape[:3]))))
    return found


def first_block(rows: Iterable[Name]) -> list[Name]:
    return [Name(row.ours, row.deepmind, row.layout, block=0) for row in rows]


@pytest.mark.parametrize("case", sorted(CASES))
def test_module_matches_alphafold(case: str, golden: Path) -> None:
    """Catches a transposed axis, a wrong mask, scale or bias, and wrong gradients."""
    build, rows, inputs = CASES[case]
    data, params = load(golden / "modules" / f"{case}.npz"), load(golden / "params.npz")
    module = build()
    load_arrays(Holder(module), first_block(rows()), params)
    assert {name for name, _ in Holder(module).named_parameters()} == {row.ours for row in rows()}

    tensors = {name: torch.from_numpy(data[f"in/{name}"]).unsqueeze(0) for name in inputs}
    differentiable = [t.requires_grad_() for name, t in tensors.items() if f"grad/{name}" in data]
    arguments = list(tensors.values()) if case.endswith("_block") else representations(tensors)
    if isinstance(module, MSARowAttention):
        arguments[1] = module.bias(arguments[1])
    outputs = module(*arguments)
    if isinstance(outputs, Added):
        outputs = Made(outputs.function(arguments[0].x) - arguments[0].x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs.x,)
    keys = ("msa", "pair") if len(outputs) == 2 else ("out",)
    for key, output in zip(keys, outputs, strict=True):
        valid = np.abs(data[f"cot/{key}"]).sum(-1, keepdims=True) > 0  # cotangents are zero on padding
        close(output[0].detach().numpy() * valid, data[f"out/{key}"] * valid, 2e-5, key)
    cotangents = [torch.from_numpy(data[f"cot/{key}"]).unsqueeze(0) for key in keys]
    gradients = torch.autograd.grad(outputs, differentiable, cotangents)
    for name, gradient in zip((n for n in tensors if f"grad/{n}" in data), gradients, strict=True):
        close(gradient[0], data[f"grad/{name}"], 1e-4, f"gradient of {name}")


def test_embedders_match_alphafold(golden: Path) -> None:
    """Catches a wrong order of features, wrong clipping of relative positions, and wrong recycled distance bins."""
    from evodsp.model.alphafold import AlphaFold

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
    from evodsp.geometry.frames import pseudo_beta

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
