"""A transformer over time and space whose blocks mix positions with any module of this package.

Shape legend: B batch, T time, S space, C channels, L positions of the context.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evodsp.parallel import dropout
from evodsp.rng import Draws

from .attention import CrossAttention

Context = Float[Tensor, "B L C"] | Float[Tensor, "B T L C"]


class Block(nn.Module):
    """A mixing module and an MLP, with layer norms, residual connections and dropout."""

    def __init__(self, width: int, mixer: nn.Module, rate: float) -> None:
        super().__init__()
        self.mixer, self.rate = mixer, rate
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(
        self, x: Float[Tensor, "B T S C"], positions: Int[Tensor, "T S"], draws: Draws, context: Context | None = None
    ) -> Float[Tensor, "B T S C"]:
        """`positions`: the number of each position, by which dropout finds its mask. `context`: for cross attention."""
        y = self.norm(x)
        y = self.mixer(y, context) if isinstance(self.mixer, CrossAttention) else self.mixer(y)
        x = x + dropout(y, self.rate, positions, draws.at("mixer"))
        return x + dropout(self.mlp(self.mlp_norm(x)), self.rate, positions, draws.at("mlp"))


class VideoTransformer(nn.Module):
    """Blocks between an embedding and a head. `mixers`: the module of each block, by the block's name."""

    def __init__(self, channels: int, width: int, mixers: Mapping[str, nn.Module], rate: float = 0.1) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(channels, width), nn.Linear(width, channels)
        self.blocks = nn.ModuleDict({name: Block(width, mixer, rate) for name, mixer in mixers.items()})

    def forward(
        self, video: Float[Tensor, "B T S channels"], context: Context | None = None
    ) -> Float[Tensor, "B T S channels"]:
        x = self.embed(video)
        positions = torch.arange(x.shape[1] * x.shape[2], device=x.device).view(x.shape[1:3])
        for name, block in self.blocks.items():
            x = block(x, positions, Draws.root(0).at(name), context)
        return self.head(x)
