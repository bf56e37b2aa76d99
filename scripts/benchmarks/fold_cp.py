"""The pair stack as Fold-CP's one-dimensional mode communicates it: a comparator for DSP and DAP, which runs and is exact.

Only the communication is Fold-CP's (NVIDIA-BioNeMo/boltz-cp, `cp_topology: "1d"`). Projections, gates, norms and the attention
kernel are those of `evodsp.model`, so a comparison shows the communication alone. What was read, in
`src/boltz/distributed/model/layers/`, at the commits 324bb5c (sub-layers) and dedfdba (block):

- `pairformer_1d.py`: the pair representation z stays on rows (I). Each block is recomputed in the backward pass, with all that
  it communicates.
- `triangular_mult_1d.py`, outgoing: the operand b goes round a ring. In the backward pass b goes round again, for the gradient
  of a; then a and the gradient of the product go together, for the gradient of b.
- `triangular_mult_1d.py`, incoming: each rank has a part of every sum, so one tile of columns after the other is
  reduce-scattered, N tiles in all. In the backward pass the gradient of the product goes round a ring twice, once for each
  operand. N must divide the number of residues.
- `triangular_attention_1d.py`, starting node: an all-gather of the bias. Its result is not kept; the backward pass gathers
  again, and reduce-scatters the gradient.
- `triangular_attention_1d.py`, ending node: the same, between an all-to-all of the normalised z to columns and another one of
  the update back to rows. A third one sends the mask, which is sharded like z. The docstring of that file still describes an
  earlier way: all-to-alls of q, k, v, the mask and the output, and a gather.

What one rank moves for one block, counted as the ledger counts (Mz = R R c; a ring is one tensor's way past all ranks):

    sub-layer                          forward                                    backward
    triangle multiplication, outgoing  ring, Mz                                   3 rings, Mz each
    triangle multiplication, incoming  N reduce-scatters, together Mz             2 rings, Mz each
    triangle attention, starting node  all-gather, 4 R R                          all-gather, reduce-scatter, 4 R R each
    triangle attention, ending node    2 all-to-alls, Mz/N each; one of R R / N;  2 all-to-alls, Mz/N each;
                                       all-gather, 4 R R                          all-gather, reduce-scatter, 4 R R each
    pair transition                    none                                       none

Not taken over, because it is not about who holds what: its rings and its gradients of biases travel in fp32, also when the
activations are bf16; it broadcasts a mask of R numbers for dropout that ranks must share; it fuses the gate of the operands
into the product and so keeps 2 c numbers less for each pair of residues.

Shape legend: B batch, R residues, i j this rank's shard of the rows I or columns J, c channels, H heads, D head width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.config import EvoformerConfig
from evodsp.errors import UserError
from evodsp.model.dropout import NO_MASKS, Masks
from evodsp.model.evoformer import PairMask, PairStack
from evodsp.model.kernels.operators import Kernels
from evodsp.model.layers import TriangleAttention, TriangleMultiplication
from evodsp.model.primitives import PairBias, ShardedModule, Transition, project
from evodsp.model.sharded import Made, Sharded, Update
from evodsp.parallel.collectives import Axis, Gather, ScatterSum, Switch, shard_sizes
from evodsp.parallel.exchange import Pending, Ready, ShardedExchange, start
from evodsp.parallel.group import Group

from .ring import ring

Ending = Literal["z", "qkv"]
"""What attention around the ending node sends to columns: the pair representation before the projections (what the
code does; the norm may come before or after), or queries, keys and values after them (what its docstring says)."""


class FoldCPPairStack(PairStack):
    """Pair stack of a block (algorithm 6, lines 6 to 10), with Fold-CP's communication. It has `PairStack`'s parameters."""

    transition: Transition

    def __init__(self, c_z: int, config: EvoformerConfig, ending: Ending = "z") -> None:
        super().__init__(c_z, config)
        channels, heads, width = config.triangle_channels, config.pair_heads, config.pair_head_width
        self.triangle_outgoing = _TriangleMultiplication(c_z, channels, "outgoing")
        self.triangle_incoming = _TriangleMultiplication(c_z, channels, "incoming")
        self.attention_starting = _StartingAttention(c_z, heads, width, "starting")
        ending_attention = _EndingAttention if ending == "z" else _EndingAttentionOfProjections
        self.attention_ending = ending_attention(c_z, heads, width, "ending")

    def forward(
        self, z: Float[Tensor, "B i J c_z"], pair_mask: PairMask, masks: Masks = NO_MASKS
    ) -> Float[Tensor, "B i J c_z"]:
        """z on I in and out. Raises UserError if the number of ranks does not divide the number of residues."""
        residues, ranks = pair_mask.shape[1], self.exchange.ranks
        if residues % ranks:
            raise UserError(
                f"Fold-CP needs equal shards, but {ranks} ranks do not divide {residues} residues; "
                f"crop or pad to a multiple of {ranks}, e.g. {residues + -residues % ranks}"
            )
        pair = Sharded(z, "i", pair_mask, self.exchange)
        pair += self.dropout["triangle_outgoing"](self.triangle_outgoing(pair), masks)
        pair += self.dropout["triangle_incoming"](self.triangle_incoming(pair), masks)
        pair += self.dropout["attention_starting"](self.attention_starting(pair), masks)
        pair += self.dropout["attention_ending"](self.attention_ending(pair), masks)
        pair += self.transition(pair)
        return pair.x


def _group(module: ShardedModule) -> Group:
    assert isinstance(module.exchange, ShardedExchange), "Fold-CP's communication needs a group of ranks"
    return module.exchange.group


class _TriangleMultiplication(TriangleMultiplication):
    def _by_channel(self, both: Float[Tensor, "2 B c i R"], axis: Axis, result_axis: Axis, residues: int) -> Pending:
        a, b = both
        product = _Outgoing if self.edges == "outgoing" else _Incoming
        return Ready(product.apply(a, b, _group(self)).permute(0, 2, 3, 1))


class _Outgoing(torch.autograd.Function):
    """x_ij = sum over k of a_ik b_jk; all three are sharded along their first index, [B, c, shard, R]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.group = group
        a = a.contiguous()
        x = torch.empty_like(a)
        for rank, (b_of_rank,) in ring(group, b):
            _block(x, rank, group).copy_(a @ b_of_rank.mT)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, b), group = ctx.saved_tensors, ctx.group
        gradient = gradient.contiguous()
        grad_a = torch.zeros_like(gradient)
        for rank, (b_of_rank,) in ring(group, b, backward=True):
            grad_a += _block(gradient, rank, group) @ b_of_rank
        grad_b = torch.zeros_like(gradient)
        for _, (a_of_rank, gradient_of_rank) in ring(group, a, gradient, backward=True):
            grad_b += _block(gradient_of_rank, group.rank, group).mT @ a_of_rank
        return grad_a, grad_b, None


class _Incoming(torch.autograd.Function):
    """x_ij = sum over k of b_ki a_kj; all three are sharded along their first index, [B, c, shard, R]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.group = group
        columns = b.mT.contiguous()  # [B, c, I, k]
        x = torch.empty_like(a, memory_format=torch.contiguous_format)
        # One tile of columns at a time: the sum over this rank's k for all rows I is never whole.
        for tile in range(group.size):
            scatter = ScatterSum(group, 2, shard_sizes(x.shape[-1], group.size))
            _block(x, tile, group).copy_(scatter.launch(columns @ _block(a, tile, group)).wait())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, b), group = ctx.saved_tensors, ctx.group
        gradient = gradient.contiguous()
        grad_b = torch.empty_like(gradient)
        for rank, (gradient_of_rank,) in ring(group, gradient, backward=True):
            _block(grad_b, rank, group).copy_(a @ gradient_of_rank.mT)
        grad_a = torch.zeros_like(gradient)
        for rank, (gradient_of_rank,) in ring(group, gradient, backward=True):
            grad_a += _block(b, rank, group) @ gradient_of_rank
        return grad_a, grad_b, None


def _block(x: Float[Tensor, "B c _ R"], rank: int, group: Group) -> Float[Tensor, "B c _ r"]:
    """The columns of `x` that belong to the residues of `rank`: a view."""
    return x.chunk(group.size, -1)[rank]


class _RegatheredBias(PairBias):
    """A pair bias that is gathered for the forward pass, not kept, and gathered again for the backward pass."""

    def __init__(self, local: Float[Tensor, "B _ _ H"], gather: Gather) -> None:
        self.local, self.gather = local, gather

    def attention(self, kernels: Kernels, projected: Tensor, keys: Tensor) -> Tensor:
        """Gated attention with this bias."""
        return _AttentionWithShardedBias.apply(kernels, projected, keys, self.local, self.gather)


class _AttentionWithShardedBias(torch.autograd.Function):
    """Keeps the shard of the bias. The backward pass gathers it and computes the attention again, then reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, projected: Tensor, keys: Tensor, local: Tensor, gather: Gather) -> Tensor:
        ctx.save_for_backward(projected, keys, local)
        ctx.kernels, ctx.gather = kernels, gather
        bias = gather.launch(local).wait()
        return kernels.biased_attention(projected, keys, bias.permute(0, 3, 1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        projected, keys, local = ctx.saved_tensors
        bias = ctx.gather.launch(local, backward=True).wait()
        projected, bias = inputs = [x.detach().requires_grad_() for x in (projected, bias)]
        with torch.enable_grad():
            result = ctx.kernels.biased_attention(projected, keys, bias.permute(0, 3, 1, 2))
        of_projected, of_bias = torch.autograd.grad(result, inputs, gradient)
        of_local = ctx.gather.transpose().launch(of_bias, backward=True).wait()
        return None, of_projected, None, of_local, None


class _StartingAttention(TriangleAttention):
    def forward(self, pair: Sharded) -> Update:
        """The update of z. Both are on I."""
        projected, local = self._project(pair.x)
        return Made(self.attention(projected, pair.own_mask, self._bias(local)))

    def _project(self, z: Tensor) -> tuple[Tensor, ...]:
        """What the projections and the layer of the bias make of the norm of z."""
        return project(self.kernels, z, self.norm, self.attention.projection, self.pair_bias.layer, planes=1)

    def _bias(self, local: Float[Tensor, "B n R H"]) -> _RegatheredBias:
        """The bias of which this rank has the queries n."""
        group = _group(self)
        return _RegatheredBias(local, Gather(group, 1, shard_sizes(local.shape[2], group.size)))


class _EndingAttention(_StartingAttention):
    def forward(self, pair: Sharded) -> Update:
        """The update of z. Both are on I; z is sent to J, and the update back."""
        residues = pair.total_sizes[0]
        projected, local = self._project(pair.switch("j").x)
        mask = self.exchange.switch(pair.own_mask.unsqueeze(-1), "i", "j", residues).squeeze(-1)
        update = self.attention(projected, mask, self._bias(local.transpose(1, 2)))
        return Made(self.exchange.switch(update, "j", "i", residues))


class _EndingAttentionOfProjections(TriangleAttention):
    def forward(self, pair: Sharded) -> Update:
        """The update of z. Both are on I; queries, keys, values and the mask are sent to J, and the result back."""
        group, layers = _group(self), (self.attention.projection, self.pair_bias.layer)
        projected, local = project(self.kernels, pair.x, self.norm, *layers, planes=1)
        sizes = shard_sizes(pair.total_sizes[0], group.size)
        bias = _BiasOnColumns(local.transpose(1, 2), Gather(group, 2, sizes))
        return Made(self.attention(projected, pair.own_mask, bias))


class _BiasOnColumns(_RegatheredBias):
    """The bias of attention whose rows are whole and whose queries and keys are sharded: it sends them to whole sequences."""

    def attention(self, kernels: Kernels, projected: Tensor, keys: Tensor) -> Tensor:
        """Attention with this bias: five all-to-alls and a gather. `projected`: [B, J, i, 4, H, D]."""
        group, sizes = self.gather.group, self.gather.sizes
        to_columns = Switch(group, 2, 1, sizes, sizes)
        *qkv, gate = projected.unbind(3)
        qkv = [start(x, to_columns).wait() for x in qkv]
        keys = start(keys, to_columns).wait()
        # The gate is applied where it was computed, after the way back: here it is open.
        o = super().attention(kernels, torch.stack([*qkv, torch.full_like(qkv[0], torch.inf)], 3), keys)
        return gate.sigmoid() * start(o, to_columns.transpose()).wait()
