"""Operations on the pair representation (algorithms 11 to 14).

Shape legend: B batch, R residues, I J residues of the pair, c channels, H heads. Small letters i j are this rank's shard of an
axis, which on one device is all of it. Masks are whole everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.primitives import GatedAttention, Linear, ShardedModule
from evodsp.parallel.collectives import Pending


class TriangleMultiplication(ShardedModule):
    """Triangular multiplicative update, outgoing or incoming edges (algorithms 11 and 12). z on J.

    Every channel is a product of its own, so the work is spread over channels: both operands go from J to channels in one
    switch, and the product comes back to `result`. No rank needs the whole pair representation.
    """

    def __init__(
        self, c_z: int, channels: int, edges: Literal["outgoing", "incoming"], result: Literal["i", "j"] = "j"
    ) -> None:
        super().__init__()
        self.edges, self.channels, self.result = edges, channels, result
        self.norm = nn.LayerNorm(c_z)
        self.projection = Linear(c_z, 2 * channels)
        self.projection_gate = Linear(c_z, 2 * channels, init="gate")
        self.product_norm = nn.LayerNorm(channels)
        self.output = Linear(channels, c_z, init="final")
        self.output_gate = Linear(c_z, c_z, init="gate")

    def forward(
        self, z: Float[Tensor, "B I j c_z"], pair_mask: Float[Tensor, "B R R"], moved: Pending | None = None
    ) -> Float[Tensor, "B _ _ c_z"]:
        """The update, on `result`. `moved`: z on its way there, if that is not J: the output gate reads it."""
        x = self.norm(z)
        mask = self.exchange.shard(pair_mask, "j").unsqueeze(-1)
        both = self.projection(x) * self.projection_gate(x).sigmoid() * mask
        # Operands side by side on the batch axis, so that a rank gets the same channels of both.
        both = self.exchange.switch(torch.cat(both.chunk(2, -1)), "j", "channel", whole=z.shape[1])
        a, b = both.permute(0, 3, 1, 2).chunk(2)  # [B, c, I, K]
        product = a @ b.transpose(-1, -2) if self.edges == "outgoing" else b.transpose(-1, -2) @ a
        back = self.exchange.start_switch(product.permute(0, 2, 3, 1), "channel", self.result, whole=self.channels)
        there = z if moved is None else moved.wait()
        gate = self.output_gate(x if there is z else self.norm(there)).sigmoid()
        return self.output(self.product_norm(back.wait())) * gate


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

    def forward(self, z: Float[Tensor, "B _ _ c_z"], pair_mask: Float[Tensor, "B R R"]) -> Float[Tensor, "B _ _ c_z"]:
        x, residues = self.norm(z), pair_mask.shape[1]
        if self.node == "starting":
            starting = self.exchange.start_gather(self.pair_bias(x), "i", whole=residues)  # [B, R, R, H]
            mask = self.exchange.shard(pair_mask, "i")
            return self.attention(x, mask, lambda: starting.wait().permute(0, 3, 1, 2))
        ending = self.exchange.start_gather(self.pair_bias(x), "j", whole=residues)
        mask = self.exchange.shard(pair_mask, "j").transpose(1, 2)
        return self.attention(x.transpose(1, 2), mask, lambda: ending.wait().permute(0, 3, 2, 1)).transpose(1, 2)
