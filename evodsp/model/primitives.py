"""Building blocks of the model: initialised linear layers, gated attention, transition, dropout.

Shape legend: B batch, L positions attended over, H heads, D head width, c channels, * any batch axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.model.kernels.registry import Kernels
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.exchange import Exchange, LocalExchange
from evodsp.parallel.layout import DIMENSION, Axis
from evodsp.parallel.pending import Pending, Ready
from evodsp.rng import Draws

Initialisation = Literal["linear", "relu", "glorot", "gate", "final"]


class Computed(nn.Module):
    """A module that calls operators of which there are several implementations. Its `kernels` are those that were chosen."""

    kernels: Kernels = Kernels()


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Set the operators of every module of `model` that calls some."""
    for module in model.modules():
        if isinstance(module, Computed):
            module.kernels = kernels


class ShardedModule(Computed):
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


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast is off. (The meta device has no autocast.)"""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


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
        kernels: Kernels,
        q: Float[Tensor, "B N L H D"],
        k: Float[Tensor, "B N L H D"],
        v: Float[Tensor, "B N L H D"],
        gate: Float[Tensor, "B N L H D"],
        keys: Float[Tensor, "B N L"],
    ) -> Float[Tensor, "B N L H D"]:
        """Gated attention with this bias. `keys`: 1 where a key is present."""
        bias = self._arriving.wait()
        if not self.stream:
            return kernels.biased_attention(q, k, v, gate, keys, bias.permute(0, 3, 1, 2))
        rows = [
            checkpoint(
                self._rows, kernels, root, q[:, :, queries], k, v, gate[:, :, queries], keys, bias, use_reentrant=False
            )
            for root, queries in enumerate(self.exchange.shards(self.whole))
        ]
        return torch.cat(rows, 2)

    def _rows(
        self, kernels: Kernels, root: int, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keys: Tensor, local: Tensor
    ) -> Tensor:
        bias = self.exchange.start_broadcast(local, "i", root, self.whole).wait()
        return kernels.biased_attention(q, k, v, gate, keys, bias.permute(0, 3, 1, 2))


class GatedAttention(Computed):
    """Gated multi-head self-attention along one axis (the core of algorithms 7, 8, 13 and 14)."""

    def __init__(self, channels: int, heads: int, head_width: int, along: Literal[1, 2] = 2) -> None:
        """`along`: dimension of the positions that attend to each other. The other one holds independent rows."""
        super().__init__()
        self.heads, self.along = heads, along
        width = heads * head_width
        self.qkv = Linear(channels, 3 * width, bias=False, init="glorot", parts=3)
        self.gate = Linear(channels, width, init="gate")
        self.output = Linear(width, channels, init="final")

    def forward(
        self,
        x: Float[Tensor, "B n1 n2 c"],
        mask: Float[Tensor, "B n1 n2"],
        pair_bias: PairBias | None = None,
    ) -> Float[Tensor, "B n1 n2 c"]:
        """`pair_bias` is shared by all rows of a sample. It may still be on its way: it is awaited after the projections."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        gate = self.gate(x).unflatten(-1, (self.heads, -1))
        if self.along == 1:  # views: operators take any strides
            qkv, gate, mask = qkv.transpose(1, 2), gate.transpose(1, 2), mask.transpose(1, 2)
        q, k, v = qkv.unbind(3)  # each [B, N, L, H, D]
        if pair_bias is None:
            o = self.kernels.attention(q, k, v, gate, mask)
        else:
            o = pair_bias.attention(self.kernels, q, k, v, gate, mask)
        if self.along == 1:
            o = o.transpose(1, 2)
        return self.output(o.flatten(-2))


class Transition(Computed):
    """Two-layer perceptron (algorithms 9 and 15)."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.widen = Linear(channels, factor * channels, init="relu")
        self.narrow = Linear(factor * channels, channels, init="final")

    def forward(self, x: Float[Tensor, "*batch c"]) -> Float[Tensor, "*batch c"]:
        widen, narrow = self.widen, self.narrow
        return self.kernels.transition(self.norm(x), widen.weight, widen.bias, narrow.weight, narrow.bias)


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
