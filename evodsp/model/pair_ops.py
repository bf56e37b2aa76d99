"""Operations on the pair representation (algorithms 11 to 14).

Shape legend: B batch, R residues, I J residues of the pair, c channels, H heads. A small letter (i j) is this rank's shard of
that axis; on one device it is the whole axis. Masks are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.products import multiply_edges
from evodsp.model.primitives import (
    GatedAttention,
    LayerNorm,
    Linear,
    PairBias,
    SubLayer,
    project_rows_and_whole,
    working_width,
)
from evodsp.model.sharded import Added, Sharded, Update
from evodsp.parallel.collectives import Axis
from evodsp.parallel.exchange import Pending, Ready


class TriangleMultiplication(SubLayer):
    """Triangular multiplicative update with outgoing or incoming edges (algorithms 11 and 12).

    Two operands are computed from each row of z, their product sums over a third residue, separately in each channel, and the
    update is computed from each row of the product. There are three ways (`CommunicationPlan.triangle_way`). Locally, one
    operator adds the update, and forms the operands again in its backward pass. By channel (z on J), one all-to-all
    sends both operands from J to channels and another one returns the product; no rank ever has the whole pair
    representation. By gathering (z on I for outgoing edges, on J for incoming ones), one operand is gathered whole. Operands
    that other ranks sent are kept for the backward pass, because forming them again would need the communication again.
    """

    shared_axis = "i"

    def __init__(self, c_z: int, channels: int, edges: Literal["outgoing", "incoming"]) -> None:
        super().__init__()
        self.edges, self.channels = edges, channels
        self.norm = LayerNorm(c_z)
        self.projection = Linear(c_z, 2 * channels)
        self.projection_gate = Linear(c_z, 2 * channels, init="gate")
        self.product_norm = LayerNorm(channels)
        self.output = Linear(channels, c_z, init="final")
        self.output_gate = Linear(c_z, c_z, init="gate")
        self.working_width = working_width(self)

    @property
    def takes(self) -> tuple[Axis, ...]:
        return (self.plan.outgoing_axis if self.edges == "outgoing" else "j",)

    @property
    def leaves(self) -> tuple[Axis, ...]:
        """By channel, the product of incoming edges returns where it is needed."""
        return ("i", "j") if self.edges == "incoming" and self.plan.triangle_incoming == "channel" else self.takes

    def forward(self, pair: Sharded, result: Sharded | None = None) -> Update:
        """The update of z. `result`: z on its way to the axis along which the update is needed, if that axis differs from
        `pair`'s.
        """
        result = pair if result is None else result
        way = self.plan.triangle_way(self.edges, self.exchange.ranks, pair.in_pieces)
        if way == "local":
            return Added(partial(self._added, pair.own_mask))
        multiply = self._by_channel if way == "channel" else self._by_gathering
        arriving = pair.by_channels(partial(self._start_product, multiply, result.axis), self.channels, width=4)
        _ = result.x  # awaited first, so that the backward pass sends the product's gradient, which more needs, first
        return Added(self._of_product, [arriving.wait()], width=self.working_width)

    def _added(self, mask: Float[Tensor, "B R R"], z: Float[Tensor, "B R R c_z"], *dropout: Any) -> Tensor:
        """z plus its update, on one device. `dropout`: as `Added` has it."""
        own = (*dropout[:2], dropout[4]) if dropout else ()
        parameters = *self._operand_parameters(), *self._output_parameters()
        return self.kernels.triangle_multiplication(z, mask, *parameters, self.edges == "outgoing", *own)

    def _output_parameters(self) -> Sequence[Tensor]:
        layers = self.output_gate, self.product_norm, self.output
        return [parameter for layer in layers for parameter in (layer.weight, layer.bias)]

    def _operand_parameters(self, some: slice = slice(None)) -> Sequence[Tensor]:
        """The parameters of the norm and of both operands' projections and gates. `some`: slice of the operands' channels."""
        linears = self.projection, self.projection_gate
        parameters = [parameter for layer in linears for parameter in (layer.weight, layer.bias)]
        if some != slice(None):
            parameters = [p.unflatten(0, (2, self.channels))[:, some].flatten(0, 1) for p in parameters]
        return self.norm.weight, self.norm.bias, *parameters

    def _start_product(
        self, multiply: Callable[[Tensor, Axis, Axis, int], Pending], result_axis: Axis, pair: Sharded, some: slice
    ) -> Pending:
        """The product of some channels of the operands, on its way to `result_axis`. `multiply`: `_by_channel` or
        `_by_gathering`.
        """
        parameters = self._operand_parameters(some)
        width = pair.x.shape[-1] + 2 * len(parameters[-1])

        def operands(z: Float[Tensor, "B _ _ c_z"], mask: Float[Tensor, "B _ _"]) -> Float[Tensor, "2 B c _ _"]:
            return self.kernels.gated_projection(z, mask, *parameters)

        # The operands get no name here, so that they are freed once they have been sent.
        return multiply(
            pair.collect(operands, pair.x, pair.own_mask, width=width, result_dim=3),
            pair.axis,
            result_axis,
            pair.total_sizes[0],
        )

    def _of_product(
        self, z: Float[Tensor, "B n1 n2 c_z"], product: Float[Tensor, "B n1 n2 c"], *dropout: Any
    ) -> Float[Tensor, "B n1 n2 c_z"]:
        """Some rows of z plus their update, from the product of these rows. `dropout`: as `Added` has it."""
        parameters = self.norm.weight, self.norm.bias, *self._output_parameters()
        return self.kernels.gated_output(z, product, *parameters, *dropout)

    def _by_channel(self, both: Float[Tensor, "2 B c I j"], axis: Axis, result_axis: Axis, residues: int) -> Pending:
        # The two operands share the batch axis, so that a rank gets the same channels of both.
        moving = self.exchange.start_switch(_channels_last(both.flatten(0, 1)), axis, "channel", whole=residues)
        # The received operands, two [B, c/N, I, J], get no name, so that they are freed before the product is sent.
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

    The gradient of the product arrives with channels last. Each of the two batched products that take it would copy it; on a
    CPU they would copy matrix by matrix and multiply one after another, which takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _channels_last(x: Float[Tensor, "B c _ _"]) -> Float[Tensor, "B _ _ c"]:
    """A view with channels last, which is the order of axes that an exchange takes."""
    return x.permute(0, 2, 3, 1)


class TriangleAttention(SubLayer):
    """Triangular gated self-attention around the starting or ending node (algorithms 13 and 14).

    Around the starting node, z is on I, and each row i attends within itself. Around the ending node, z is on J, and each
    column j attends within itself: the same with i and j exchanged, where bias and mask are transposed and z is not.
    """

    def __init__(self, c_z: int, heads: int, head_width: int, node: Literal["starting", "ending"]) -> None:
        super().__init__()
        self.node = node
        self.norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_z, heads, head_width, along=2 if node == "starting" else 1)
        self.working_width = working_width(self)
        self.shared_axis: Axis = "i" if node == "starting" else "j"

    @property
    def takes(self) -> tuple[Axis, ...]:
        return (self.shared_axis,)

    def forward(self, pair: Sharded) -> Update:
        width, dim, layer = self.working_width, self.attention.rows, self.attention.projection
        of_bias = self.pair_bias.layer
        rows, local = project_rows_and_whole(self.kernels, pair, self.norm, layer, of_bias, width=width, dim=dim)
        if self.node == "ending":
            local = local.transpose(1, 2)
        bias = PairBias(local, "i", pair, self.plan)
        return self.attention.update(pair, self.norm, layer, rows, bias, width)
