"""The multi-dimensional transformer of the DSP paper (arXiv 2403.10266, appendix A.1), for one device.

A layer has one transformer block per axis; a block attends along its axis only. With the axes (time, space) it is the paper's
2-D transformer, Open-Sora's without cross attention. With (time, height, width) it is the same in three dimensions. Nothing
here knows of ranks: `scripts/paper/methods` adds each kind of parallelism from outside. Dropout only has to be told which
tokens it sees.

Shapes: B samples, c channels of the latents, T frames, H x W pixels; tokens [B, T, S, C] or [B, T, H', W', C] of width C, where
S = H' x W' counts patches. `*axes` stands for the token axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.parallel import dropout
from evodsp.rng import Draws

from .config import TransformerConfig


class AxisAttention(nn.Module):
    """Softmax attention along one axis of the tokens, every other axis being a batch axis. It has no parameters."""

    def __init__(self, dim: int) -> None:
        """`dim`: the token dimension along which to attend (1: time)."""
        super().__init__()
        self.dim = dim

    def forward(
        self, q: Float[Tensor, "B *axes h d"], k: Float[Tensor, "B *axes h d"], v: Float[Tensor, "B *axes h d"]
    ) -> Float[Tensor, "B *axes h d"]:
        """Queries, keys and values of h heads."""
        moved = [x.movedim(self.dim, -2) for x in (q, k, v)]
        out = self.attend(*(x.flatten(0, -4) for x in moved))
        return out.unflatten(0, moved[0].shape[:-3]).movedim(-2, self.dim)

    def attend(
        self, q: Float[Tensor, "rows h L d"], k: Float[Tensor, "rows h L d"], v: Float[Tensor, "rows h L d"]
    ) -> Float[Tensor, "rows h L d"]:
        """Attention within each row of L tokens."""
        return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Multi-head self-attention along one axis."""

    def __init__(self, config: TransformerConfig, dim: int) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        # Rows are ordered head, then query/key/value: a slice of the rows holds whole heads.
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.core: nn.Module = AxisAttention(dim)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Float[Tensor, "B *axes C"]) -> Float[Tensor, "B *axes C"]:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).unbind(-2)
        return self.out(self.core(q, k, v).flatten(-2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x: Float[Tensor, "B *axes C"]) -> Float[Tensor, "B *axes C"]:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block that attends along one axis."""

    def __init__(self, config: TransformerConfig, dim: int) -> None:
        super().__init__()
        self.dropout, self.checkpoint = config.dropout, config.checkpoint
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, dim)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(
        self, x: Float[Tensor, "B *axes C"], positions: Int64[Tensor, " B *axes"], draws: Draws | None = None
    ) -> Float[Tensor, "B *axes C"]:
        """`positions`: number of each token in the whole tensor. `draws`: random numbers for dropout; None: no dropout."""
        # Inside the block, so that a hook that switches the block's input is not run again.
        if self.checkpoint and torch.is_grad_enabled():
            return checkpoint(self._updated, x, positions, draws, use_reentrant=False)
        return self._updated(x, positions, draws)

    def _updated(self, x: Tensor, positions: Tensor, draws: Draws | None) -> Tensor:
        x = x + self._dropped(self.attention(self.attention_norm(x)), positions, draws and draws.at("attention"))
        return x + self._dropped(self.mlp(self.mlp_norm(x)), positions, draws and draws.at("mlp"))

    def _dropped(self, update: Tensor, positions: Tensor, draws: Draws | None) -> Tensor:
        if draws is None or not self.training:
            return update
        return dropout(update, self.dropout, positions, draws)


class Layer(nn.ModuleDict):
    """One block per axis, under the axis's name, the last axis first: space before time, as in Open-Sora."""

    def __init__(self, config: TransformerConfig) -> None:
        axes = list(enumerate(config.axes, 1))
        super().__init__({axis: Block(config, dim) for dim, axis in reversed(axes)})

    def forward(
        self, x: Float[Tensor, "B *axes C"], positions: Int64[Tensor, " B *whole"], draws: Draws | None = None
    ) -> Float[Tensor, "B *others C"]:
        """Under DSP the blocks' inputs are shards that the positions are not, and change their sharded axis."""
        for axis, block in self.items():
            x = block(x, positions, draws and draws.at(axis))
        return x


class Transformer(nn.Module):
    """Latents in, latents of the same shape out. Its stages are also public one by one: `embed`, `transform`, `unembed`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        values = config.in_channels * prod(config.patch)
        self.embedding = nn.Linear(values, config.width)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.unembedding = nn.Linear(config.width, values)

    def forward(self, latents: Float[Tensor, "B c T H W"], draws: Draws | None = None) -> Float[Tensor, "B c T H W"]:
        """`draws`: random numbers of this pass's dropout, another stream for each step; None: no dropout."""
        tokens = self.embed(latents)
        return self.unembed(self.transform(tokens, positions_of(tokens), draws), latents.shape)

    def blocks_along(self, axis: str) -> list[Block]:
        """The blocks that attend along an axis, one per layer."""
        found = [module for path, module in self.blocks.named_modules() if path.endswith(f".{axis}")]
        return [block for block in found if isinstance(block, Block)]

    def embed(self, latents: Float[Tensor, "B c T H W"]) -> Float[Tensor, "B *axes C"]:
        """Patches as tokens, plus a sinusoidal embedding of the position along each axis."""
        sizes = self.config.token_sizes(latents.shape)
        pt, ph, pw = self.config.patch
        patches = latents.unflatten(4, (-1, pw)).unflatten(3, (-1, ph)).unflatten(2, (-1, pt))
        tokens = self.embedding(patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4))
        tokens = tokens.reshape(len(latents), *sizes, self.config.width)
        return tokens + sinusoids(sizes, self.config.width, tokens)

    def transform(
        self, tokens: Float[Tensor, "B *axes C"], positions: Int64[Tensor, " B *axes"], draws: Draws | None = None
    ) -> Float[Tensor, "B *axes C"]:
        """All layers."""
        for number, layer in enumerate(self.blocks):
            tokens = layer(tokens, positions, draws and draws.at("layer", number))
        return tokens

    def unembed(self, tokens: Float[Tensor, "B *axes C"], shape: Sequence[int]) -> Float[Tensor, "B c T H W"]:
        """Tokens as patches of latents of the given shape [B, c, T, H, W]."""
        batch, channels, *whole = shape
        grid = [size // patch for size, patch in zip(whole, self.config.patch, strict=True)]
        values = self.unembedding(self.norm(tokens)).reshape(batch, *grid, channels, *self.config.patch)
        return values.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(batch, channels, *whole)


def positions_of(tokens: Float[Tensor, "B *axes C"]) -> Int64[Tensor, " B *axes"]:
    """The number of each token: what its dropout depends on, wherever it is computed."""
    shape = tokens.shape[:-1]
    return torch.arange(prod(shape), device=tokens.device).view(shape)


def sinusoids(sizes: Sequence[int], width: int, like: Tensor) -> Float[Tensor, "*axes C"]:
    """Sines and cosines of the positions along each axis, at geometrically falling frequencies (Vaswani et al., 2017).

    The axes take turns at the frequencies: with all frequencies for each axis, (1, 2) and (2, 1) would look alike.
    """
    number = torch.arange(width // 2, device=like.device)
    frequency = torch.exp(number * (-2 * log(10_000) / width))
    angle = torch.zeros(*sizes, width // 2, device=like.device)
    for axis, size in enumerate(sizes):
        position = torch.arange(size, device=like.device).view(-1, *[1] * (len(sizes) - axis))
        angle = angle + position * torch.where(number % len(sizes) == axis, frequency, 0.0)
    return torch.cat((angle.sin(), angle.cos()), -1).to(like.dtype)
