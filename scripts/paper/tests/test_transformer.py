"""The one-device model, on which all comparisons rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from scripts.paper.config import AXES, TransformerConfig
from scripts.paper.transformer import Block, Transformer, positions_of

pytestmark = pytest.mark.verify

CONFIGS = Path(__file__).parents[3] / "scripts" / "paper" / "configs"
SMALL = TransformerConfig(layers=1, width=8, heads=2)


@pytest.mark.parametrize("axes", AXES)
def test_a_block_mixes_tokens_along_its_axis_only(axes: tuple[str, ...]) -> None:
    """Catches attention along another axis, which no comparison of methods shows: they all attend along the same one."""
    config = dataclasses.replace(SMALL, axes=axes)
    for dim in range(1, len(axes) + 1):
        x = torch.randn(2, *(3, 4, 5)[: len(axes)], 8, requires_grad=True)
        Block(config, dim)(x, positions_of(x))[(0,) * (x.ndim - 1)].sum().backward()
        assert x.grad is not None
        reached = x.grad.abs().sum(-1).nonzero()
        assert {tuple(index) for index in reached.tolist()} == {
            tuple(n if axis == dim else 0 for axis in range(x.ndim - 1)) for n in range(x.shape[dim])
        }


@pytest.mark.parametrize("axes", AXES)
def test_a_patch_is_a_token_and_comes_back_to_its_place(axes: tuple[str, ...]) -> None:
    """Catches rows and columns, or channels and pixels, that change places in either direction."""
    model = Transformer(dataclasses.replace(SMALL, axes=axes, patch=(2, 2, 3)))
    latents = torch.randn(1, 4, 4, 6, 12)
    changed = latents.clone()
    changed[:, :, 2:4, 4:6, 3:6] += 1  # patch (1, 2, 1) of (2, 3, 4)
    tokens = model.embed(latents)
    difference = (model.embed(changed) - tokens).abs().sum((0, -1))
    assert difference.nonzero().tolist() == [[1, 2, 1] if len(axes) == 3 else [1, 2 * 4 + 1]]
    moved = tokens + difference[None, ..., None]
    place = (model.unembed(moved * tokens, latents.shape) - model.unembed(tokens * tokens, latents.shape)).abs()
    assert place[0, :, 2:4, 4:6, 3:6].count_nonzero() == 4 * 2 * 2 * 3
    assert place.count_nonzero() == 4 * 2 * 2 * 3


def test_every_token_gets_its_own_position() -> None:
    """Catches an embedding that leaves out an axis, or is the same for (1, 2) and (2, 1)."""
    tokens = Transformer(SMALL).embed(torch.zeros(1, 4, 3, 4, 6)).flatten(0, 2)
    assert len(tokens) == 18
    assert torch.cdist(tokens, tokens).add(torch.eye(18)).min().item() > 1e-3


@pytest.mark.parametrize(
    ("name", "millions"), [("720m", 892.7), ("3b", 3625.9), ("small", 3.6), ("tiny", 0.05), ("tiny_3d", 0.08)]
)
def test_configurations_have_the_parameters_that_their_comments_say(name: str, millions: float) -> None:
    """Catches a configuration that no longer loads, and a size that no longer is what the comment tells."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig.load(CONFIGS / f"{name}.yaml"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
