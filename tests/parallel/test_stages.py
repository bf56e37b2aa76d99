"""`parallelize`: models written for one device, whose submodules say along which axis they compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.parallel import Stage, dropout, parallelize
from evodsp.parallel.testing import check, dense
from evodsp.rng import Draws
from tests.builders.axial import Built, kinds
from tests.ranks import RankPool

WIDTH, SIZES = 4, {"time": 5, "height": 7, "width": 6}
DIMS = {"time": 1, "height": 2, "width": 3}


class Attention(nn.Module):
    """Self-attention along one dimension, with an optional mask [T, H, ...] of keys."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.projections, self.out = dim, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.projections(x.movedim(self.dim, -2)).chunk(3, -1)
        if mask is not None:
            k = k + mask.movedim(self.dim - 1, -1).unsqueeze(-1)
        return self.out(F.scaled_dot_product_attention(q, k, v)).movedim(-2, self.dim)


class Block(nn.Module):
    """A transformer block, residual connections inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(dim), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, draws: Draws) -> Tensor:
        x = x + dropout(self.attention(self.norm(x)), 0.3, positions, draws.at("attention"))
        return x + self.mlp(x).tanh()


class Layer(nn.Module):
    """One block after another, or attention modules with residual connections outside of them."""

    def __init__(self, axes: list[str], inside: bool) -> None:
        super().__init__()
        self.inside = inside
        for axis in axes:
            self.add_module(axis, Block(DIMS[axis]) if inside else Attention(DIMS[axis]))

    def forward(self, x: Tensor, positions: Tensor, draws: Draws, mask: Tensor) -> Tensor:
        for axis, stage in self.named_children():
            x = stage(x, positions, draws.at(axis)) if self.inside else x + stage(x, mask=mask)
        return x


class Transformer(nn.Module):
    """Layers between an embedding and a head, which see whole tensors."""

    def __init__(self, axes: list[str], inside: bool, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.recompute = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), recompute
        self.layers = nn.ModuleList(Layer(axes, inside) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[1:-1]
        positions, mask = (
            torch.arange(shape.numel()).view(shape),
            torch.arange(shape.numel()).view(shape).sin().double(),
        )
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            draws = Draws.root(1).at(number)
            if self.recompute:
                x = checkpoint(layer, x, positions, draws, mask, use_reentrant=False)
            else:
                x = layer(x, positions, draws, mask)
        return self.head(x)


def built(axes: list[str], inside: bool, recompute: bool = False) -> Built:
    """A model with random parameters, and its input."""
    model = dense(Transformer(axes, inside, recompute))
    shape = [SIZES[axis] for axis in axes]
    return model, (torch.randn(2, *shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


def stages_of(axes: list[str], inside: bool) -> dict[str, Stage]:
    """What a user writes."""
    layout = " ".join(axes)
    if inside:
        return {f"layers.*.{a}": Stage(a, residual="inside", whole={"positions": layout}) for a in axes}
    return {f"layers.*.{a}": Stage(a, whole={"mask": layout}) for a in axes}


def in_parallel(model: nn.Module, mesh: Any, axes: list[str], inside: bool) -> None:
    parallelize(model, mesh, f"batch {' '.join(axes)} channel", stages_of(axes, inside), region="layers")


SWITCHES = {(2, True): 3, (2, False): 4, (3, True): 2, (3, False): 4}
"""Fewest all-to-alls of two layers, by number of axes and whether residual connections lie inside. With two axes time,
height, time, height: one before each stage but the first; or there and back for two of four. With three axes a switch lasts for
two stages."""


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("axes", [["time", "height"], ["time", "height", "width"]])
def test_a_parallel_model_computes_what_one_device_does(pool: RankPool, axes: list[str], inside: bool) -> None:
    """Catches a missing or superfluous switch, wrong gradients, shards of masks and positions of another axis, and states that
    are wrong when activations are recomputed."""
    parallel = partial(in_parallel, axes=axes, inside=inside)
    for ranks, recompute in ((2, False), (3, True), (4, False)):
        check(*built(axes, inside, recompute), parallel, (ranks,), run=pool.run)
        for found in pool.run(ranks, kinds, partial(built, axes, inside, recompute), parallel):
            assert found.count("all-to-all") == SWITCHES[len(axes), inside]
