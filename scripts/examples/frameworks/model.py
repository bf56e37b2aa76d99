"""A small space-time transformer, written for one device, and the data that the programs of this folder train it on.

Shapes: x [batch, time, space, channel].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME, SPACE = 5, 7
SAMPLES = 4
"""Samples of a step, over all data ranks."""
STEPS = 3
MAX_NORM = 0.5
"""The gradient's norm is clipped to this."""

LAYOUT = "batch time space channel"
STAGES = {"blocks.*.spatial": "space", "blocks.*.temporal": "time"}
"""Which submodules mix positions, and along which axis: all that `evodsp.parallel.parallelize` needs to know."""


class Attention(nn.Module):
    """Normalisation, then self-attention along one dimension."""

    def __init__(self, dim: int, channels: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        # [..., position, head, q k v, width]: a head's numbers lie together, so that tensor parallelism can cut between heads.
        qkv = self.qkv(self.norm(x)).movedim(self.dim, -2).unflatten(-1, (self.heads, 3, -1))
        q, k, v = qkv.transpose(-3, -4).unbind(-2)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        return self.out(y).movedim(-2, self.dim)


class Transition(nn.Module):
    """Normalisation, then two linear layers, for each position by itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.wide = nn.Linear(channels, 4 * channels)
        self.out = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.wide(self.norm(x))))


class Block(nn.Module):
    """Attention along space, attention along time, and a transition."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.spatial = Attention(2, channels, heads)
        self.temporal = Attention(1, channels, heads)
        self.transition = Transition(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.spatial(x)
        x = x + self.temporal(x)
        return x + self.transition(x)


class SpaceTimeTransformer(nn.Module):
    """Blocks over time and space, from 3 channels to 2."""

    def __init__(self, channels: int = 8, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(3, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new_model() -> SpaceTimeTransformer:
    """The model in double precision, with the same parameters in every process."""
    torch.manual_seed(0)
    return SpaceTimeTransformer().double()


def batch(step: int, data_rank: int = 0, data_ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a data rank's share of a step's samples."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, TIME, SPACE, 3, generator=generator, dtype=torch.float64)
    y = torch.stack([x.cumsum(1)[..., 0].sin(), x[..., 1:].prod(-1).roll(1, 2)], -1)
    return x.chunk(data_ranks)[data_rank], y.chunk(data_ranks)[data_rank]
