"""Operations on the pair representation (algorithms 11 to 14).

Shape legend: B batch, R residues, I J residues of the pair, c channels, H heads. Small letters i j are this rank's shard of an
axis, which on one device is all of it. Masks are whole everywhere.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from evodsp.model.primitives import GatedAttention, Linear, PairBias, ShardedModule
from evodsp.parallel.layout import Axis
from evodsp.parallel.pending import Pending, Ready


class TriangleMultiplication(ShardedModule):
    """Triangular multiplicative update, outgoing or incoming edges (algorithms 11 and 12).

    By channel (z on J): every channel is a product of its own, so both operands go from J to channels in one switch, and the
    product comes back on `result`. No rank needs the whole pair representation.
    By gathering (z on I for outgoing, on J for incoming edges): one operand is gathered whole, the product is where z is.
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
        self, z: Float[Tensor, "B _ _ c_z"], pair_mask: Float[Tensor, "B R R"], moved: Pending | None = None
    ) -> Float[Tensor, "B _ _ c_z"]:
        """The update. `moved`: z on its way to where the update comes out, if that is elsewhere: the output gate reads it."""
        way = self.plan.triangle_outgoing if self.edges == "outgoing" else self.plan.triangle_incoming
        axis: Axis = "i" if (self.edges, way) == ("outgoing", "gather") else "j"
        x = self.norm(z)
        mask = self.exchange.shard(pair_mask, axis).unsqueeze(-1)
        multiply = self._by_channel if way == "channel" else self._by_gathering
        # Not given a name here: the operands are to be free once they have been sent.
        product = multiply(self.projection(x) * self.projection_gate(x).sigmoid() * mask, pair_mask.shape[1])
        there = z if moved is None else moved.wait()
        gate = self.output_gate(x if there is z else self.norm(there)).sigmoid()
        return self.output(self.product_norm(product.wait())) * gate

    def _by_channel(self, both: Float[Tensor, "B I j cc"], residues: int) -> Pending:
        # Operands on the batch axis, so that a rank gets the same channels of both.
        both = both.unflatten(-1, (2, self.channels)).movedim(-2, 0).flatten(0, 1)  # a view, for a batch of one
        both = self.exchange.switch(both, "j", "channel", whole=residues)
        product = self._product(*both.permute(0, 3, 1, 2).chunk(2))
        return self.exchange.start_switch(product, "channel", self.result, whole=self.channels)

    def _by_gathering(self, both: Float[Tensor, "B _ _ cc"], residues: int) -> Pending:
        a, b = both.chunk(2, -1)
        # Outgoing: rows of the product are rows of a, columns are rows of b. Incoming: rows are columns of b, columns of a.
        b = self.exchange.gather(b, "i" if self.edges == "outgoing" else "j", whole=residues)
        return Ready(self._product(a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2)))

    def _product(self, a: Float[Tensor, "B c _ _"], b: Float[Tensor, "B c _ _"]) -> Float[Tensor, "B _ _ c"]:
        """Sum over the third residue, channel by channel."""
        product = a @ b.transpose(-1, -2) if self.edges == "outgoing" else b.transpose(-1, -2) @ a
        return product.permute(0, 2, 3, 1)


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
        if self.node == "ending":
            z, pair_mask = z.transpose(1, 2), pair_mask.transpose(1, 2)
        x = self.norm(z)
        bias = PairBias(self.pair_bias(x), "i", pair_mask.shape[1], self.exchange, self.plan)
        update = self.attention(x, self.exchange.shard(pair_mask, "i"), bias)
        return update.transpose(1, 2) if self.node == "ending" else update
