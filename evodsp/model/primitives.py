"""Building blocks of the model: initialised linear layers, gated attention, transition, dropout.

Shape legend: B batch, L positions attended over, H heads, D head width, c channels, * any batch axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from evodsp.model.kernels.attention import attention
from evodsp.model.precision import without_autocast
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.exchange import Exchange, LocalExchange
from evodsp.parallel.layout import DIMENSION, Axis
from evodsp.parallel.pending import Pending, Ready
from evodsp.rng import Draws

# Subtracting this from a logit removes its key from the softmax. If all keys are masked, the weights are uniform, as in AF2.
MASKED = 1e9

Initialisation = Literal["linear", "relu", "glorot", "gate", "final"]


class ShardedModule(nn.Module):
    """A module that may need data from other shards. It calls its `exchange` (on one device a `LocalExchange`), in the way that
    its `plan` says.
    """

    exchange: Exchange = LocalExchange()
    plan: CommunicationPlan = CommunicationPlan()
    gathers_parameters: bool = False
    """Whether this module is a unit of FSDP2: its parameters are gathered together when it runs."""


def use_exchange(model: nn.Module, exchange: Exchange, plan: CommunicationPlan | None = None) -> None:
    """Set the exchange and the plan of every module of `model` that communicates."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.exchange, module.plan = exchange, plan or CommunicationPlan()


class Linear(nn.Linear):
    """Linear layer with AF2's initialisations (supplement 1.11.4).

    `linear`: LeCun normal, truncated; `relu`: He normal, truncated (before a ReLU); `glorot`: Glorot uniform (queries, keys,
    values; `parts`: how many of them share one matrix); `gate`: weight 0 and bias 1, so that gates start open; `final`:
    zero, so that every residual branch starts as the identity.
    """

    computes_in_float32 = False
    """Whether the parameters are used in float32 with autocast too; they are then not cast (`evodsp.model.casts`)."""

    def __init__(
        self, c_in: int, c_out: int, bias: bool = True, init: Initialisation = "linear", parts: int = 1
    ) -> None:
        self._init, self._parts = init, parts
        super().__init__(c_in, c_out, bias=bias)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.bias is not None:
                self.bias.fill_(1.0 if self._init == "gate" else 0.0)
            if self._init in ("gate", "final"):
                self.weight.zero_()
            elif self._init == "glorot":
                limit = math.sqrt(6.0 / (self.in_features + self.out_features // self._parts))
                self.weight.uniform_(-limit, limit)
            else:
                # 0.8796…: standard deviation of a unit normal truncated at two standard deviations.
                scale = math.sqrt((2.0 if self._init == "relu" else 1.0) / self.in_features) / 0.87962566103423978
                nn.init.trunc_normal_(self.weight, std=scale, a=-2 * scale, b=2 * scale)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last axis. The result has the precision of `x`, with autocast too; statistics are in float32."""

    computes_in_float32 = False
    """Whether `x` is in float32 with autocast too; the parameters are then not cast (`evodsp.model.casts`)."""

    def forward(self, x: Float[Tensor, "*batch c"]) -> Float[Tensor, "*batch c"]:
        with without_autocast(x.device):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def mask_bias(mask: Float[Tensor, "*batch L"]) -> Float[Tensor, "*batch L"]:
    """Additive bias of keys: 0 where the mask is 1, -1e9 where it is 0."""
    return (mask - 1.0) * MASKED


class PairBias:
    """The bias that attention takes from the pair representation. It is gathered while projections are computed.

    With `plan.stream_bias` it is never whole. Queries are then processed shard by shard, each with the broadcast bias of its
    rows; the backward pass broadcasts it again.
    """

    def __init__(
        self, local: Float[Tensor, "B _ _ H"], axis: Axis, whole: int, exchange: Exchange, plan: CommunicationPlan
    ) -> None:
        """`local`: this rank's shard along `axis`. Axis 1 holds queries, axis 2 keys; both have the full size `whole`."""
        self.whole, self.exchange, self.stream = whole, exchange, plan.stream_bias
        if not self.stream:
            self._arriving: Pending = exchange.start_gather(local, axis, whole)
        else:
            self._arriving = exchange.start_switch(local, "j", "i", whole) if axis == "j" else Ready(local)

    def attention(
        self,
        q: Float[Tensor, "B N H L D"],
        k: Float[Tensor, "B N H L D"],
        v: Float[Tensor, "B N H L D"],
        keys: Float[Tensor, "B N L"],
    ) -> Float[Tensor, "B N H L D"]:
        """Attention with this bias. `keys`: additive bias of each key."""
        bias = self._arriving.wait()
        if not self.stream:
            return attention(q, k, v, keys, bias.permute(0, 3, 1, 2))
        rows = [
            checkpoint(self._rows, root, q[..., queries, :], k, v, keys, bias, use_reentrant=False)
            for root, queries in enumerate(self.exchange.shards(self.whole))
        ]
        return torch.cat(rows, -2)

    def _rows(self, root: int, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, local: Tensor) -> Tensor:
        bias = self.exchange.start_broadcast(local, "i", root, self.whole).wait()
        return attention(q, k, v, keys, bias.permute(0, 3, 1, 2))


class GatedAttention(nn.Module):
    """Gated multi-head self-attention within each row (the core of algorithms 7, 8, 13 and 14)."""

    def __init__(self, channels: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        width = heads * head_width
        self.qkv = Linear(channels, 3 * width, bias=False, init="glorot", parts=3)
        self.gate = Linear(channels, width, init="gate")
        self.output = Linear(width, channels, init="final")

    def forward(
        self,
        x: Float[Tensor, "B N L c"],
        mask: Float[Tensor, "B N L"],
        pair_bias: PairBias | None = None,
    ) -> Float[Tensor, "B N L c"]:
        """`pair_bias` is shared by all rows N of a sample. It may still be on its way: it is awaited after the projections."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # each [B, N, H, L, D]
        keys = mask_bias(mask)
        o = attention(q, k, v, keys) if pair_bias is None else pair_bias.attention(q, k, v, keys)
        return self.output(o.transpose(-2, -3).flatten(-2) * self.gate(x).sigmoid())


class Transition(nn.Module):
    """Two-layer perceptron (algorithms 9 and 15)."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.norm = LayerNorm(channels)
        self.widen = Linear(channels, factor * channels, init="relu")
        self.narrow = Linear(factor * channels, channels, init="final")

    def forward(self, x: Float[Tensor, "*batch c"]) -> Float[Tensor, "*batch c"]:
        return self.narrow(self.widen(self.norm(x)).relu())


class Dropout(ShardedModule):
    """Dropout of a residual update, with a mask shared along one axis of the representation (supplement 1.11.6).

    The mask is a function of the sample's random stream, of `layer` and of positions in the WHOLE representation. It is
    therefore the same on every mesh, and the same again when activations are recomputed.
    """

    def __init__(self, rate: float, layer: str, shared_axis: Axis) -> None:
        """`layer`: name of the sub-layer whose update is dropped; a part of the random numbers' address."""
        super().__init__()
        self.rate, self.layer, self.shared_axis = rate, layer, shared_axis

    def forward(
        self, x: Float[Tensor, "B n1 n2 c"], draws: Sequence[Draws], total_sizes: tuple[int, int], axis: Axis
    ) -> Float[Tensor, "B n1 n2 c"]:
        """`draws`: one stream per sample; none means no dropout. `total_sizes`: sizes of axes 1 and 2 over all shards. `axis`:
        the one along which `x` is sharded.
        """
        if not draws or self.rate == 0.0:
            return x
        sizes = [*total_sizes, x.shape[-1]]
        sizes[DIMENSION[self.shared_axis] - 1] = 1
        positions = torch.arange(math.prod(sizes), device=x.device)
        keep = torch.stack([d.at(self.layer).uniform_at(positions) for d in draws]) >= self.rate
        mask = keep.view(len(draws), *sizes).to(x.dtype) / (1.0 - self.rate)
        return x * (mask if axis == self.shared_axis else self.exchange.shard(mask, axis))
