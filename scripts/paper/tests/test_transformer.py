"""The one-device model, on which all comparisons rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evodsp.rng import Draws
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


def test_blocks_of_a_layer_run_under_the_names_of_the_axes() -> None:
    """Catches names that DSP's stages would not find, and a time block before the space block."""
    paths = [path for path, module in Transformer(SMALL).named_modules() if isinstance(module, Block)]
    assert paths == ["blocks.0.space", "blocks.0.time"]


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


def test_unembedding_reverses_the_order_of_values_within_a_patch() -> None:
    """Catches a transposed patch: the embedding's order of values is the unembedding's."""
    model = Transformer(dataclasses.replace(SMALL, width=16))
    model.norm = torch.nn.Identity()
    for layer in (model.embedding, model.unembedding):
        layer.weight.data.copy_(torch.eye(16))
        layer.bias.data.zero_()
    latents = torch.randn(2, 4, 3, 4, 6)
    shift = model.embed(torch.zeros_like(latents))  # the positions' embedding
    torch.testing.assert_close(model.unembed(model.embed(latents) - shift, latents.shape), latents)


def test_every_token_gets_its_own_position() -> None:
    """Catches an embedding that leaves out an axis, or is the same for (1, 2) and (2, 1)."""
    tokens = Transformer(SMALL).embed(torch.zeros(1, 4, 3, 4, 6)).flatten(0, 2)
    assert len(tokens) == 18
    assert torch.cdist(tokens, tokens).add(torch.eye(18)).min().item() > 1e-3


def dropped(seed: int = 0, training: bool = True) -> Tensor:
    """Tokens of zeros after a layer whose updates are all one."""
    block = Block(dataclasses.replace(SMALL, dropout=0.25), 1).train(training)
    for module in (block.attention.out, block.mlp.down):
        module.weight.data.zero_()
        module.bias.data.fill_(1.0)
    x = torch.zeros(2, 8, 8, 8)
    return block(x, positions_of(x), Draws.root(seed)).detach()


def test_dropout() -> None:
    """Catches a wrong rate or scale, a mask that branches, samples or steps share, and dropout in evaluation."""
    x = dropped()
    kept = (x * 0.75).round()  # branches of the two that kept an element
    counts = {value: (kept == value).double().mean().item() for value in kept.unique().tolist()}
    assert counts.keys() == {0, 1, 2}
    assert counts[0] == pytest.approx(1 / 16, abs=0.03)  # both branches dropped: with one mask it would be 1/4
    assert counts[1] == pytest.approx(6 / 16, abs=0.03)
    assert not torch.equal(x[0], x[1])
    assert not torch.equal(x, dropped(seed=1))
    torch.testing.assert_close(x, kept / 0.75)
    assert torch.equal(dropped(training=False), torch.full((2, 8, 8, 8), 2.0))


def test_layers_and_axes_have_their_own_masks() -> None:
    """Catches a stream of random numbers that two blocks share."""
    seen = []

    class Recorder(torch.nn.Module):
        def forward(self, x: Tensor, positions: Tensor, draws: Draws) -> Tensor:
            seen.append(draws.key)
            return x

    model = Transformer(dataclasses.replace(SMALL, layers=2))
    for layer in model.blocks:
        for axis in SMALL.axes:
            layer[axis] = Recorder()
    model(torch.zeros(1, 4, 2, 4, 4), Draws.root(0))
    assert len(set(seen)) == 4


@pytest.mark.parametrize(
    ("name", "millions"), [("720m", 892.7), ("3b", 3625.9), ("small", 3.6), ("tiny", 0.05), ("tiny_3d", 0.08)]
)
def test_configurations_have_the_parameters_that_their_comments_say(name: str, millions: float) -> None:
    """Catches a configuration that no longer loads, and a size that no longer is what the comment tells."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig.load(CONFIGS / f"{name}.yaml"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
