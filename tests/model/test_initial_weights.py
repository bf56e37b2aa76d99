"""Weights at the start of training against the supplement's formulas (1.11.4), layer by layer.

Several projections may be fused into one matrix. Glorot's limit depends on the width of ONE projection's output.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import EvoformerConfig, StructureModuleConfig, TemplateConfig
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.structure_module import StructureModule
from evodsp.model.templates import TemplatePointwiseAttention

C_M, C_Z, C_S, HEADS, WIDTH, FACTOR = 96, 80, 112, 3, 48, 4
TRUNCATED = 0.87962566103423978
"""Standard deviation of a unit normal truncated at two standard deviations."""


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Parameters by name of an Evoformer block, an extra-MSA block, template attention and the structure module."""
    torch.manual_seed(0)
    config = EvoformerConfig(
        msa_heads=HEADS, msa_head_width=WIDTH, pair_heads=HEADS, pair_head_width=WIDTH, triangle_channels=72,
        outer_product_channels=16, transition_factor=FACTOR,
    )  # fmt: skip
    modules: dict[str, nn.Module] = {
        "block": EvoformerBlock(C_M, C_Z, config),
        "extra": EvoformerBlock(C_M, C_Z, config, extra=True),
        "templates": TemplatePointwiseAttention(
            C_Z, TemplateConfig(channels=64, attention_heads=HEADS, attention_head_width=WIDTH)
        ),
        "structure": StructureModule(C_S, C_Z, StructureModuleConfig()),
    }
    return {f"{name}.{key}": x.detach() for name, module in modules.items() for key, x in module.named_parameters()}


def find(weights: dict[str, Tensor], suffix: str, count: int) -> list[Tensor]:
    """The parameters whose names end in `suffix`. There must be exactly `count`, so that none is overlooked."""
    found = {name: x for name, x in weights.items() if name.endswith(suffix)}
    assert len(found) == count, f"{suffix}: {sorted(found)}"
    return list(found.values())


def check_uniform(weight: Tensor, limit: float) -> None:
    """Check a uniform distribution in ±limit: the largest of thousands of draws lies just below the limit."""
    assert 0.99 * limit < weight.abs().max() <= limit
    assert weight.var().item() == pytest.approx(limit**2 / 3, rel=0.05)


def check_normal(weight: Tensor, variance: float) -> None:
    """Check a normal distribution of this variance, truncated at two standard deviations of the untruncated normal."""
    assert weight.var().item() == pytest.approx(variance, rel=0.05)
    assert 0.95 < weight.abs().max().item() / (2 * math.sqrt(variance) / TRUNCATED) <= 1.0


def test_fused_queries_keys_and_values_have_the_limit_of_one_of_them(weights: dict[str, Tensor]) -> None:
    """Catches a limit computed from the fused matrix's width: weights would be smaller by a factor of up to 1.4."""
    msa = find(weights, "row_attention.attention.qkv.weight", 2) + find(
        weights, "column_attention.attention.qkv.weight", 1
    )
    pair = find(weights, "attention_starting.attention.qkv.weight", 2) + find(
        weights, "attention_ending.attention.qkv.weight", 2
    )
    for c_in, matrices in ((C_M, msa), (C_Z, pair)):
        for matrix in matrices:
            for part in matrix.chunk(3):
                check_uniform(part, math.sqrt(6 / (c_in + HEADS * WIDTH)))


def test_fused_keys_and_values_have_the_limit_of_one_of_them(weights: dict[str, Tensor]) -> None:
    """Catches the same for keys and values: one head in global attention, all heads in template attention."""
    check_uniform(find(weights, "column_attention.query.weight", 1)[0], math.sqrt(6 / (C_M + HEADS * WIDTH)))
    check_uniform(find(weights, "templates.query.weight", 1)[0], math.sqrt(6 / (C_Z + HEADS * WIDTH)))
    for suffix, c_in, width in (
        ("column_attention.key_value.weight", C_M, WIDTH),
        ("templates.key_value.weight", 64, HEADS * WIDTH),
    ):
        for part in find(weights, suffix, 1)[0].chunk(2):
            check_uniform(part, math.sqrt(6 / (c_in + width)))


def test_transitions_start_with_he_and_end_with_zero(weights: dict[str, Tensor]) -> None:
    """Catches a first layer with half the variance, and a transition that is not the identity at the start."""
    widen = find(weights, "ransition.widen.weight", 4)
    for weight in widen:
        assert weight.shape[0] == FACTOR * weight.shape[1]
        check_normal(weight, 2 / weight.shape[1])
    for name in ("weight", "bias"):
        assert not any(x.any() for x in find(weights, f"ransition.narrow.{name}", 4))
    assert not any(x.any() for x in find(weights, "ransition.widen.bias", 4))
    for number in (0, 1):
        check_normal(find(weights, f"structure.transition.{number}.weight", 1)[0], 2 / C_S)
    assert not find(weights, "structure.transition.2.weight", 1)[0].any()


def test_invariant_point_attention_starts_as_the_identity(weights: dict[str, Tensor]) -> None:
    """Catches frames that move at random before training, and projections that are not LeCun normal."""
    assert not any(x.any() for name, x in weights.items() if name.startswith("structure.attention.output."))
    assert not any(x.any() for name, x in weights.items() if name.startswith("structure.backbone_update."))
    for name, c_in in (("query", C_S), ("key_value", C_S), ("query_points", C_S), ("key_value_points", C_S)):
        check_normal(find(weights, f"structure.attention.{name}.weight", 1)[0], 1 / c_in)
    # The point weights are 1 after softplus (supplement 1.8.2).
    assert nn.functional.softplus(find(weights, "structure.attention.point_weight", 1)[0]).tolist() == pytest.approx(
        [1.0] * 12
    )


def test_every_residual_update_starts_at_zero_and_every_gate_open(weights: dict[str, Tensor]) -> None:
    """Catches an update whose last layer starts random, and a gate that starts closed."""
    updates = [x for name, x in weights.items() if name.endswith((".output.weight", ".output.bias"))]
    assert len(updates) == 2 * (3 + 1 + 3 + 1 + 2 * 4)  # attention, outer product mean, templates, IPA, pair halves
    assert not any(x.any() for x in updates)
    gates = {name: x for name, x in weights.items() if "gate." in name}
    assert gates
    for name, x in gates.items():
        assert (x == (1.0 if name.endswith("bias") else 0.0)).all(), name
