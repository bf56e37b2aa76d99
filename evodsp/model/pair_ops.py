"""Operations on the pair representation (algorithms 11 to 14).

Shape legend: B batch, R residues, I J residues of the pair, c channels, H heads. A small letter (i j) is this rank's shard of
that axis; on one device it is the whole axis. Masks are whole on every rank.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triangle_products import multiply_edges
from evodsp.model.primitives import GatedAttention, LayerNorm, Linear, PairBias, ShardedModule, project
from evodsp.parallel.layout import Axis
from evodsp.parallel.pending import Pending, Ready


class TriangleMultiplication(ShardedModule):
    """Triangular multiplicative update with outgoing or incoming edges (algorithms 11 and 12).

    The product sums over a third residue, separately in each channel. Hence two ways of communicating (`CommunicationPlan`):
    By channel (z on J): one all-to-all takes both operands from J to channels, another one brings the product back. No rank
    ever has the whole pair representation.
    By gathering (z on I for outgoing edges, on J for incoming ones): one operand is gathered whole.
    """

    def __init__(self, c_z: int, channels: int, edges: Literal["outgoing", "incoming"]) -> None:
        super().__init__()
        self.edges, self.channels = edges, channels
        self.norm = LayerNorm(c_z)
        self.projection = Linear(c_z, 2 * channels)
        self.projection_gate = Linear(c_z, 2 * channels, init="gate")
        self.product_norm = LayerNorm(channels)
        self.output = Linear(channels, c_z, init="final")
        self.output_gate = Linear(c_z, c_z, init="gate")

    def forward(
        self,
        z: Float[Tensor, "B _ _ c_z"],
        pair_mask: Float[Tensor, "B R R"],
        axis: Axis = "j",
        result_axis: Axis | None = None,
        switched: Pending | None = None,
    ) -> Float[Tensor, "B _ _ c_z"]:
        """The update of z, which is sharded along `axis`. The update is sharded along `result_axis` (default: `axis`).

        `switched`: z on its way to `result_axis`, if that differs from `axis`; the output gate reads it.
        """
        mask = self.exchange.shard(pair_mask, axis)
        layers = self.norm, self.projection, self.projection_gate
        parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
        if self.exchange.ranks == 1:
            # Operands are formed again in the backward pass. Those that other ranks sent are kept: forming them again would
            # mean to communicate them again.
            gate_of_output = self.output_gate.weight, self.output_gate.bias
            product, gate = self.kernels.triangle_product(
                z, mask, *parameters, *gate_of_output, self.edges == "outgoing"
            )
            product = _channels_last(product)
        else:
            # The operands get no name here, so that they are freed once they have been sent.
            sent = self.multiply(
                self.kernels.gated_projection(z, mask, *parameters), axis, result_axis or axis, pair_mask.shape[1]
            )
            gated = z if switched is None else switched.wait()
            (gate,) = project(self.kernels, gated, self.norm, self.output_gate.layer)
            product = sent.wait()
        norm, output = self.product_norm, self.output
        return self.kernels.gated_output(product, gate, norm.weight, norm.bias, output.weight, output.bias)

    def multiply(self, both: Float[Tensor, "2 B c _ _"], axis: Axis, result_axis: Axis, residues: int) -> Pending:
        """The product of the two operands `both`, in the way that the plan says."""
        way = self.plan.triangle_outgoing if self.edges == "outgoing" else self.plan.triangle_incoming
        multiply = self._by_channel if way == "channel" else self._by_gathering
        return multiply(both, axis, result_axis, residues)

    def _by_channel(self, both: Float[Tensor, "2 B c I j"], axis: Axis, result_axis: Axis, residues: int) -> Pending:
        # The two operands share the batch axis, so that a rank gets the same channels of both.
        moving = self.exchange.start_switch(_channels_last(both.flatten(0, 1)), axis, "channel", whole=residues)
        # What arrives, two [B, c/N, I, J], gets no name, so that it is freed before the product is sent.
        product = self._product(*moving.wait().permute(0, 3, 1, 2).chunk(2))
        return self.exchange.start_switch(product, "channel", result_axis, whole=both.shape[2])

    def _by_gathering(self, both: Float[Tensor, "2 B c _ _"], axis: Axis, result_axis: Axis, residues: int) -> Pending:
        if result_axis != axis:
            raise ValueError(f"gathering leaves the product on '{axis}', not on '{result_axis}'")
        a, b = both
        # Outgoing: rows of the product come from rows of a, columns from rows of b. Incoming: from columns of b and of a.
        b = self.exchange.gather(_channels_last(b), axis, whole=residues).permute(0, 3, 1, 2)
        return Ready(self._product(a, b))

    def _product(self, a: Float[Tensor, "B c _ _"], b: Float[Tensor, "B c _ _"]) -> Float[Tensor, "B _ _ c"]:
        """Sum over the third residue k, separately in each channel: a_ik b_jk (outgoing) or a_kj b_ki (incoming)."""
        return _channels_last(_ContiguousGradient.apply(multiply_edges(a, b, self.edges == "outgoing")))


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose gradient is laid out afresh.

    The gradient of the product comes with channels last. The two batched products that it goes into would each copy it; on a
    CPU they would copy matrix by matrix and multiply one after another, which takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _channels_last(x: Float[Tensor, "B c _ _"]) -> Float[Tensor, "B _ _ c"]:
    """A view in the order of axes in which exchanges take representations."""
    return x.permute(0, 2, 3, 1)


class TriangleAttention(ShardedModule):
    """Triangular gated self-attention around the starting or ending node (algorithms 13 and 14).

    Around the starting node, z is on I, and each row i attends within itself. Around the ending node, z is on J, and each
    column j does. That is the same with i and j exchanged: the bias and the mask are transposed, z is not.
    """

    def __init__(self, c_z: int, heads: int, head_width: int, node: Literal["starting", "ending"]) -> None:
        super().__init__()
        self.node = node
        self.norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_z, heads, head_width, along=2 if node == "starting" else 1)

    def forward(self, z: Float[Tensor, "B _ _ c_z"], pair_mask: Float[Tensor, "B R R"]) -> Float[Tensor, "B _ _ c_z"]:
        layers = self.attention.projection, self.pair_bias.layer
        projected, local = project(self.kernels, z, self.norm, *layers, planes=1)
        if self.node == "ending":
            local = local.transpose(1, 2)
        bias = PairBias(local, "i", pair_mask.shape[1], self.exchange, self.plan)
        mask = self.exchange.shard(pair_mask, "i" if self.node == "starting" else "j")
        return self.attention(projected, mask, bias)
