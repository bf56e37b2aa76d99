"""Parts of the template modules that DeepMind's arrays (test_golden_modules) do not show, and distances as bins, with which
embeddings of recycled positions and of templates begin."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import ChannelsConfig, EmbedderConfig, TemplateConfig
from evodsp.model.dropout import DropoutKeys
from evodsp.model.embedders import RecyclingEmbedder, distance_one_hot, squared_edges
from evodsp.model.primitives import Linear, ShardedModule, use_exchange
from evodsp.model.sharded import Sharded
from evodsp.model.templates import (
    TemplateEmbedder,
    Templates,
    template_torsion_features,
)
from evodsp.parallel.collectives import shard_slice
from evodsp.parallel.exchange import LocalExchange
from evodsp.rng import Draws

SMALL = TemplateConfig(channels=6, blocks=2, pair_heads=2, pair_head_width=3, triangle_channels=5, unit_vector=True)


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


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        (0.0, None), (3.25, None), (3.3, 0), (4.4, 0), (4.6, 1), (10.0, 5), (20.7, 13), (20.8, 14), (25.0, 14),
        (120.0, 14), (5000.0, 14),
    ],
)  # fmt: skip
def test_the_bin_of_a_distance(distance: float, expected: int | None) -> None:
    """Catches a last bin with an upper end, which atoms of a large protein lie beyond, a first bin without a lower one, and
    edges of a neighbouring bin."""
    lower = squared_edges(3.25, 20.75, 15)
    found = distance_one_hot(
        torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[0.6 * distance, 0.0, -0.8 * distance]]), lower
    )
    assert found.shape == (1, 1, 15)
    assert found[0, 0].nonzero().flatten().tolist() == ([] if expected is None else [expected])


def test_the_range_of_distances_is_the_configs() -> None:
    """Catches AlphaFold2's range of bins in a model that has another one."""
    recycling = EmbedderConfig(recycle_bins=5, recycle_min_distance=2.0, recycle_max_distance=10.0)
    templates = TemplateConfig(
        channels=4, blocks=1, distogram_bins=5, distogram_min_distance=2.0, distogram_max_distance=10.0
    )
    edges = torch.tensor([4.0, 16.0, 36.0, 64.0, 100.0])
    torch.testing.assert_close(RecyclingEmbedder(ChannelsConfig(msa=4, pair=4, single=4), recycling).lower, edges)
    torch.testing.assert_close(TemplateEmbedder(4, templates).lower, edges)
