"""The layers of a block: operations on the MSA representation (algorithms 7 to 10 and 19) and on the pair representation
(algorithms 11 to 14).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c channels, H heads, D head width. A small
letter (s r i j) is this rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.products import multiply_edges
from evodsp.model.precision import without_autocast
from evodsp.model.primitives import (
    GatedAttention,
    LayerNorm,
    Linear,
    PairBias,
    SubLayer,
    project,
    project_rows,
    project_rows_and_whole,
    working_width,
)
from evodsp.model.sharded import Added, Sharded, Update
from evodsp.parallel.collectives import Axis, shard_sizes
from evodsp.parallel.exchange import Exchange, LocalExchange, Pending, Ready


class MSARowAttention(SubLayer):
    """MSA row-wise gated self-attention with pair bias (algorithm 7). m is on S, z on J."""

    takes, reads, shared_axis = ("seq",), ("j",), "seq"

    def __init__(self, c_m: int, c_z: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.pair_norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads, head_width)

    def bias(self, pair: Sharded) -> PairBias:
        """The bias of attention. Only it, H channels, is communicated; z stays where it is."""
        local = pair.collect(self._bias, pair.x, width=2 * pair.x.shape[-1])
        return PairBias(local, "j", pair, self.plan)

    def forward(self, msa: Sharded, bias: PairBias) -> Update:
        """The update of m. `bias`: result of `bias`, perhaps still on its way."""
        layer = self.attention.projection
        return self.attention.update(msa, self.norm, layer, project_rows(self.kernels, msa, self.norm, layer), bias)

    def _bias(self, z: Float[Tensor, "B I j c_z"]) -> Float[Tensor, "B I j H"]:
        return project(self.kernels, z, self.pair_norm, self.pair_bias.layer, planes=1)[0]


class MSAColumnAttention(SubLayer):
    """MSA column-wise gated self-attention (algorithm 8). m is on R, where each rank has whole columns."""

    takes = ("res",)

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads, head_width, along=1)

    def forward(self, msa: Sharded) -> Update:
        layer = self.attention.projection
        return self.attention.update(msa, self.norm, layer, project_rows(self.kernels, msa, self.norm, layer))


class MSAColumnGlobalAttention(SubLayer):
    """MSA column-wise gated attention with one global query per column (algorithm 19).

    With m on S, ranks exchange only sums over their sequences: first the sum for the mean query, then the numerator and
    denominator of the softmax average with their shift. With m on R nothing is exchanged.
    """

    def __init__(self, c_m: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        width = heads * head_width
        self.norm = LayerNorm(c_m)
        self.query = Linear(c_m, width, bias=False, init="glorot")
        self.key_value = Linear(c_m, 2 * head_width, bias=False, init="glorot", parts=2)
        self.gate = Linear(c_m, width, init="gate")
        self.output = Linear(width, c_m, init="final")
        self.working_width = working_width(self)

    @property
    def takes(self) -> tuple[Axis, ...]:
        return (self.plan.extra_msa_axis,)

    def forward(self, msa: Sharded) -> Update:
        """The update of m, which is on S or on R."""
        sharded = msa.axis == "seq"
        over_sequences = self.exchange if sharded else LocalExchange()
        count = (msa.mask if sharded else msa.own_mask).sum(1, keepdim=True)
        columns = partial(self._columns, over_sequences)
        return msa.update(columns, msa.x, msa.own_mask, count, width=self.working_width, dim=2)

    def _columns(
        self,
        over_sequences: Exchange,
        m: Float[Tensor, "B s r c_m"],
        mask: Float[Tensor, "B s r"],
        count: Float[Tensor, "B 1 r"],
    ) -> Float[Tensor, "B s r c_m"]:
        """The update of some columns. `count`: number of sequences in each column, over all ranks."""
        layers = self.key_value, self.gate
        local, key_value, gate = self.kernels.pooled_projections(
            m, mask, self.norm.weight, self.norm.bias, [one.weight for one in layers], [one.bias for one in layers]
        )
        total = over_sequences.start_sum(local)  # [B, r, c_m]
        mean = total.wait() / (count.squeeze(1).unsqueeze(-1) + 1e-10)
        q = self.query(mean.to(gate.dtype)).unflatten(-1, (self.heads, -1))  # [B, r, H, D]
        sums = self.kernels.global_attention(q, key_value.unflatten(-1, (2, -1)), mask)
        # Numerator and denominator of the softmax average over sequences: [B, r, H, D + 1].
        numerator, denominator = over_sequences.softmax_sums(sums).split((self.head_width, 1), -1)
        average = (numerator / denominator).flatten(-2).unsqueeze(1).to(gate.dtype)  # [B, 1, r, H D]
        return self.kernels.gated_linear(average, gate, self.output.weight, self.output.bias)


class OuterProductMean(SubLayer):
    """Outer product mean (algorithm 10): the update of z on J.

    With m on R, the 32-channel operand of rows I is gathered. With m on S there are two ways (`CommunicationPlan`): gather that
    operand and switch the other one to R, or reduce partial sums over each rank's sequences, which moves fewer bytes where
    there are many sequences.
    """

    takes, leaves = ("seq", "res"), ("j",)

    def __init__(self, c_m: int, c_z: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.norm = LayerNorm(c_m)
        self.left_right = Linear(c_m, 2 * channels)
        self.output = Linear(channels * channels, c_z, init="final")
        self.working_width = working_width(self)
        self.working_width_of_pairs = 2 * channels**2 + 3 * c_z

    def forward(self, msa: Sharded) -> Update:
        """The update of z. m is sharded along S or R."""
        mask = msa.own_mask.unsqueeze(-1)
        left, right = msa.collect(self._operands, msa.x, mask, width=self.working_width)  # sharded as m is
        counts = self.counts(msa.mask)
        sequences, residues = msa.total_sizes
        channels, c_z, ranks = self.channels, self.output.out_features, self.exchange.ranks
        if msa.axis == "seq" and self.plan.sums_outer_products(sequences, residues, channels, c_z, ranks):
            total = self._reduced(left, right, sequences)
            return msa.update(self._mean_of_sums, total, counts, width=2 * c_z)
        if msa.axis == "seq":
            moving = self.exchange.start_gather(left, "seq", whole=sequences)
            right = self.exchange.switch(right, "seq", "res", whole=sequences)
            left = moving.wait()
        else:
            left = self.exchange.gather(left, "res", whole=residues)
        mean = partial(self._mean, right)
        return msa.update(mean, left.transpose(1, 2), counts, width=self.working_width_of_pairs)

    def _operands(
        self, m: Float[Tensor, "B _ _ c_m"], mask: Float[Tensor, "B _ _ 1"]
    ) -> tuple[Float[Tensor, "B _ _ c"], Float[Tensor, "B _ _ c"]]:
        """Both operands, each with contiguous channels."""
        (both,) = project(self.kernels, m, self.norm, self.left_right.layer)
        mask = mask.to(both.dtype)
        left, right = (operand * mask for operand in both.chunk(2, -1))
        return left, right

    def _mean(
        self, columns: Float[Tensor, "B S j c"], rows: Float[Tensor, "B I S c"], counts: Float[Tensor, "B I j 1"]
    ) -> Float[Tensor, "B I j c_z"]:
        """The outer product mean from operands that hold all sequences."""
        left = rows.transpose(1, 2)
        return self.kernels.outer_product(left, columns, self.output.weight, self.output.bias, counts)

    def _mean_of_sums(
        self, total: Float[Tensor, "B I j c_z"], counts: Float[Tensor, "B I j 1"]
    ) -> Float[Tensor, "B I j c_z"]:
        """The outer product mean from projected outer products that are already summed over all sequences."""
        return _Quotient.apply(total + self.output.bias.to(total.dtype), counts)

    def counts(self, msa_mask: Float[Tensor, "B S R"]) -> Float[Tensor, "B I j 1"]:
        """Number of sequences that have both residues, plus 0.001."""
        with without_autocast(msa_mask.device):  # half precision does not count beyond 256
            return (msa_mask.transpose(1, 2) @ self.exchange.shard(msa_mask, "res")).unsqueeze(-1) + 1e-3

    def _reduced(
        self, left: Float[Tensor, "B s R c"], right: Float[Tensor, "B s R c"], sequences: int
    ) -> Float[Tensor, "B I j c_z"]:
        """Partial sums over this rank's sequences, computed and reduced a few rows at a time. `sequences`: number of
        sequences over all ranks.
        """
        residues, ranks = right.shape[2], self.exchange.ranks
        pieces = self.plan.pieces_of_partial_sums(sequences, residues, self.channels, self.output.out_features, ranks)
        updates: list[Tensor] = []
        reducing: Pending | None = None
        for rows in left.split(shard_sizes(residues, pieces), 2):
            partial = self.kernels.outer_product(rows, right, self.output.weight)
            if reducing is not None:  # at most one reduction is under way while the next partial sum is computed
                updates.append(reducing.wait())
            reducing = self.exchange.start_scatter_sum(partial, "j", whole=residues)
            del partial  # the collective may have sent a copy
        assert reducing is not None  # there is at least one piece
        updates.append(reducing.wait())
        return torch.cat(updates, 1)


class _Quotient(torch.autograd.Function):
    """x / count in the precision of x, and so is the gradient, although the count is in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return torch.div(x, count, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (count,) = ctx.saved_tensors
        return torch.div(grad, count, out=torch.empty_like(grad)), None


def first_row(m: Float[Tensor, "B S r c_m"]) -> Float[Tensor, "B r c_m"]:
    """The query's row of m. With m on R every rank has it, for its own residues."""
    return m[:, 0]


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
