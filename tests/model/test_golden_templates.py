"""The template modules against DeepMind's AlphaFold2: outputs and gradients, with the tolerances of test_golden_modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evodsp.config import TemplateConfig
from evodsp.model.dropout import DropoutKeys
from evodsp.model.primitives import Linear, ShardedModule, use_exchange
from evodsp.model.sharded import Sharded
from evodsp.model.templates import (
    TemplateEmbedder,
    TemplatePairStack,
    TemplatePointwiseAttention,
    Templates,
    TemplateTorsionEmbedder,
    template_torsion_features,
)
from evodsp.parallel.collectives import shard_slice
from evodsp.parallel.exchange import LocalExchange
from evodsp.rng import Draws
from evodsp.weights import names
from evodsp.weights.deepmind import load_arrays
from evodsp.weights.names import Name, Prefix
from tests.builders.golden import Holder, close
from tests.shared import load

SCOPE = "evoformer/template_embedding"
SIZES = TemplateConfig(blocks=1, checkpoint=False)
SMALL = TemplateConfig(channels=6, blocks=2, pair_heads=2, pair_head_width=3, triangle_channels=5, unit_vector=True)

Arrays = dict[str, np.ndarray]


def loaded(module: nn.Module, rows: Iterable[Name], params: Arrays) -> None:
    """Fill all parameters of `module` from DeepMind's arrays."""
    rows = list(rows)
    load_arrays(Holder(module), rows, params)
    assert {name for name, _ in Holder(module).named_parameters()} == {row.ours for row in rows}


def batched(data: Arrays) -> dict[str, Tensor]:
    """The module's inputs with a batch axis of one."""
    return {k.removeprefix("in/"): torch.from_numpy(v).unsqueeze(0) for k, v in data.items() if k.startswith("in/")}


def check(output: Tensor, x: dict[str, Tensor], data: Arrays) -> None:
    """Compare the output where the cotangent is not zero (it is zero on padding), and all input gradients in `data`."""
    valid = np.abs(data["cot/out"]).sum(-1, keepdims=True) > 0
    close(output[0].detach().numpy() * valid, data["out/out"] * valid, 2e-5, "out")
    wanted = [k.removeprefix("grad/") for k in data if k.startswith("grad/")]
    gradients = torch.autograd.grad(output, [x[k] for k in wanted], torch.from_numpy(data["cot/out"]).unsqueeze(0))
    for name, gradient in zip(wanted, gradients, strict=True):
        close(gradient[0], data[f"grad/{name}"], 1e-4, f"gradient of {name}")


@pytest.mark.parametrize("recompute", [False, True])
def test_pair_stack_matches_alphafold(recompute: bool, golden: Path) -> None:
    """Catches the Evoformer's order of updates (multiplication before attention), and a wrong mask or width."""
    data, params = load(golden / "modules" / "template_pair_stack.npz"), load(golden / "params.npz")
    module = TemplatePairStack(replace(SIZES, checkpoint=recompute))
    stack = f"{SCOPE}/single_template_embedding/{names.TEMPLATE_STACK['monomer']}"
    loaded(module, names.template_pair_stack(Prefix("x", stack), 1), params)
    x = batched(data)
    check(module(x["t"].requires_grad_(), x["pair_mask"]), x, data)


def test_pointwise_attention_matches_alphafold(golden: Path) -> None:
    """Catches attention along residues instead of templates, a gate that AF2 does not have, and an ignored template mask."""
    data, params = load(golden / "modules" / "template_pointwise_attention.npz"), load(golden / "params.npz")
    module = TemplatePointwiseAttention(128, SIZES)
    loaded(module, names.template_pointwise_attention(Prefix("x", f"{SCOPE}/attention")), params)
    x = batched(data)
    check(module(x["t"].requires_grad_(), x["z"].requires_grad_(), x["template_mask"]), x, data)


def test_embedding_matches_alphafold(golden: Path) -> None:
    """Catches a wrong order of the 88 features, swapped rows and columns, wrong bins, and gaps treated as neighbours."""
    data, params = load(golden / "modules" / "template_embedding.npz"), load(golden / "params.npz")
    module = TemplateEmbedder(128, SIZES)
    loaded(module, names.template_embedder(Prefix("x", SCOPE), SIZES), params)
    x = batched(data)
    pair = Sharded.whole(x["z"].requires_grad_(), "j", x["mask_2d"])
    check(module(pair, Templates.from_features(x)).x, x, data)


def test_torsion_rows_match_alphafold(golden: Path) -> None:
    """Catches masked undefined angles (AF2 does not mask them), swapped atom names, and a row mask other than psi's."""
    data, params = load(golden / "modules" / "template_single_embedding.npz"), load(golden / "params.npz")
    module = TemplateTorsionEmbedder(256)
    loaded(module, names.template_torsion_embedder(Prefix("x", "evoformer")), params)
    templates = Templates.from_features(batched(data))
    rows, mask = module(module.features(templates))
    close(template_torsion_features(templates)[0], data["out/template_angle_feat"], 2e-5, "features")
    close(rows[0], data["out/template_rows"], 2e-5, "rows")
    close(mask[0], data["out/template_rows_mask"], 0.0, "mask")


def test_every_template_parameter_of_the_file_has_a_name(golden: Path) -> None:
    """Catches an array in DeepMind's file that nothing reads."""
    rows = [
        *names.template_embedder(Prefix("x", SCOPE), SIZES),
        *names.template_torsion_embedder(Prefix("x", "evoformer")),
    ]
    read = [key for row in rows for key in row.keys]
    assert len(read) == len(set(read))
    assert set(read) == {key for key in load(golden / "params.npz") if "/template_" in key}


def random_templates(batch: int = 2, count: int = 3, residues: int = 5, shift: float = 0.0) -> Templates:
    generator = torch.Generator().manual_seed(0)
    positions = 5.0 * torch.randn(batch, count, residues, 37, 3, generator=generator) + shift
    ones = torch.ones(batch, count, residues)
    return Templates(
        aatype=torch.randint(0, 22, (batch, count, residues), generator=generator),
        positions=positions,
        atom_mask=torch.ones(batch, count, residues, 37),
        beta=positions[..., 3, :],
        beta_mask=ones,
        mask=torch.ones(batch, count),
    )


def with_random_weights(module: nn.Module) -> nn.Module:
    """Make the weights of all linear layers random, so that every branch contributes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, Linear):
                part.weight.copy_(torch.randn(part.weight.shape, generator=generator) / part.in_features**0.5)
    return module


def test_unit_vectors_are_directions_in_the_frame_of_the_row() -> None:
    """Catches an inverse rotation, swapped rows and columns, and a mirrored axis.

    The golden tests cannot: published models do not use these vectors.
    """
    templates = random_templates()
    vectors = TemplateEmbedder(7, SMALL).pair_features(templates)[..., -4:-1]
    n, ca, c = (templates.positions[..., atom, :] for atom in range(3))
    i, j = 1, 3
    x = nn.functional.normalize(c[..., i, :] - ca[..., i, :], dim=-1)
    to_n = n[..., i, :] - ca[..., i, :]
    y = nn.functional.normalize(to_n - x * (x * to_n).sum(-1, keepdim=True), dim=-1)
    axes = torch.stack([x, y, torch.linalg.cross(x, y)], -2)
    direction = nn.functional.normalize(ca[..., j, :] - ca[..., i, :], dim=-1)
    torch.testing.assert_close(vectors[:, :, i, j], (axes @ direction.unsqueeze(-1)).squeeze(-1), atol=1e-5, rtol=0)
    assert not torch.diagonal(vectors, dim1=2, dim2=3).any()


def test_missing_beta_is_told_apart_from_missing_backbone() -> None:
    """Catches one mask used for the other.

    The golden templates cannot: they have a CB wherever they have a backbone.
    """
    templates = random_templates()
    templates.beta_mask[:, :, 1] = 0.0
    templates.atom_mask[:, :, 2, 1] = 0.0
    features = TemplateEmbedder(7, SMALL).pair_features(templates)
    beta, backbone = features[..., SMALL.distogram_bins], features[..., -1]
    assert not beta[:, :, 1].any()
    assert not beta[:, :, :, 1].any()
    assert backbone[:, :, 1, 0].all()
    assert not features[:, :, 2].any()
    assert not features[:, :, :, 2].any()


def test_no_template_no_update() -> None:
    """Catches an output bias, or an average over masked templates, added to a sample without templates."""
    templates = random_templates()
    templates.mask[1] = 0.0
    pair = Sharded.whole(torch.randn(2, 5, 5, 7), "j", torch.ones(2, 5, 5))
    module = with_random_weights(TemplateEmbedder(7, SMALL))
    update = module(pair, templates).x
    assert update[0].any()
    assert not update[1].any()
    templates.mask[0, 2] = 0.0
    templates.positions[0, 2] += torch.randn(5, 37, 3)
    fewer = module(pair, templates).x
    templates.positions[0, 2] += torch.randn(5, 37, 3)
    assert torch.equal(fewer, module(pair, templates).x)


def test_omega_after_a_gap_is_zero_wherever_the_template_lies() -> None:
    """Catches AF2's rounding noise: a unit vector in a random direction, which changes the pair representation by 1."""
    templates = random_templates(shift=17.3)
    for values in (templates.positions, templates.atom_mask):
        values[:, :, 2] = 0.0
    omega = template_torsion_features(templates)[..., 22:24]
    assert not omega[:, :, [0, 3]].any()
    assert omega[:, :, [1, 4]].any(-1).all()


def test_dropout_differs_between_templates_and_repeats() -> None:
    """Catches one mask for all templates, and a mask that recomputation does not reproduce."""
    templates = random_templates(batch=1)
    same = Templates(*(getattr(templates, field.name)[:, [0, 0]] for field in fields(templates)))
    module = with_random_weights(TemplateEmbedder(7, SMALL))
    seen: list[Tensor] = []
    module.stack.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    pair = Sharded.whole(torch.randn(1, 5, 5, 7), "j", torch.ones(1, 5, 5))
    keys = DropoutKeys.of(module.dropout_streams([Draws.root(3)], templates=2))
    first, second = (module(pair, same, keys).x for _ in range(2))
    assert torch.equal(first, second)
    module(pair, same)
    assert (seen[0][0] - seen[0][1]).abs().max() > 0.1
    torch.testing.assert_close(seen[2][0], seen[2][1])


class Rows(LocalExchange):
    """Rank `rank` of two, as far as the input features need an exchange: a shard of axis I."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def owned(self, whole: int) -> slice:
        return shard_slice(whole, 2, self.rank)


def test_pair_features_are_made_shard_by_shard() -> None:
    """Catches a rank that builds rows for the residues of other ranks."""
    templates = random_templates()
    module: ShardedModule = TemplateEmbedder(7, SMALL)
    whole, parts = module.pair_features(templates), []
    for rank in range(2):
        use_exchange(module, Rows(rank))
        parts.append(module.pair_features(templates))
    assert torch.equal(torch.cat(parts, 2), whole)
