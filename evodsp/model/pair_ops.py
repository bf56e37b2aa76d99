"""Operations on the pair representation (algorithms 11 to 14).

Shape legend: B batch, I J residues, c channels, H heads.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.primitives import GatedAttention, Linear, ShardedModule


class TriangleMultiplication(ShardedModule):
    """Triangular multiplicative update, outgoing or incoming edges (algorithms 11 and 12). z on J.

    Every channel is a product of its own, so the work is spread over channels: both operands go from J to channels in one
    switch, and the product comes back to J. No rank needs the whole pair representation.
    """

    def __init__(self, c_z: int, channels: int, edges: Literal["outgoing", "incoming"]) -> None:
        super().__init__()
        self.edges = edges
        self.norm = nn.LayerNorm(c_z)
        self.projection = Linear(c_z, 2 * channels)
        self.projection_gate = Linear(c_z, 2 * channels, init="gate")
        self.product_norm = nn.LayerNorm(channels)
        self.output = Linear(channels, c_z, init="final")
        self.output_gate = Linear(c_z, c_z, init="gate")

    def forward(self, z: Float[Tensor, "B I J c_z"], pair_mask: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J c_z"]:
        x = self.norm(z)
        both = self.projection(x) * self.projection_gate(x).sigmoid() * pair_mask.unsqueeze(-1)
        # Operands side by side on the batch axis, so that a rank gets the same channels of both.
        both = self.exchange.switch(torch.cat(both.chunk(2, -1)), "j", "channel")
        a, b = both.permute(0, 3, 1, 2).chunk(2)  # [B, c, I, K]
        product = a @ b.transpose(-1, -2) if self.edges == "outgoing" else b.transpose(-1, -2) @ a
        product = self.exchange.switch(product.permute(0, 2, 3, 1), "channel", "j")
        return self.output(self.product_norm(product)) * self.output_gate(x).sigmoid()


class TriangleAttention(ShardedModule):
    """Triangular gated self-attention around the starting or ending node (algorithms 13 and 14). z on I, or on J.

    The ending node's is the starting node's on the transposed pair representation.
    """

    def __init__(self, c_z: int, heads: int, head_width: int, node: Literal["starting", "ending"]) -> None:
        super().__init__()
        self.node = node
        self.norm = nn.LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_z, heads, head_width)

    def forward(self, z: Float[Tensor, "B I J c_z"], pair_mask: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J c_z"]:
        x = self.norm(z)
        bias = self.exchange.gather(self.pair_bias(x), "i" if self.node == "starting" else "j")  # [B, R, R, H]
        if self.node == "ending":
            x, bias, pair_mask = x.transpose(1, 2), bias.transpose(1, 2), pair_mask.transpose(1, 2)
        update = self.attention(x, pair_mask, bias.permute(0, 3, 1, 2))
        return update.transpose(1, 2) if self.node == "ending" else update
