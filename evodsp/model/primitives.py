"""Building blocks of the model: initialised linear layers, gated attention, transition.

Shape legend: B batch, L positions attended over, H heads, D head width, c channels, * any batch axes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import without_autocast
from evodsp.model.recomputation import computed_again
from evodsp.model.schedule import CommunicationPlan
from evodsp.model.sharded import NO_LIMIT, PROJECTING_AGAIN, Budget, Mask, Sharded, Unmade, Update
from evodsp.parallel.collectives import Axis
from evodsp.parallel.exchange import Exchange, LocalExchange, Pending, Ready, Shared

Layer = tuple[Float[Tensor, "_ c"], Float[Tensor, " _"] | None]
"""Weight and bias of a linear layer. A bias that is shorter than the layer's result belongs to the last channels."""

Initialisation = Literal["linear", "relu", "glorot", "gate", "final"]


class Computed(nn.Module):
    """A module that calls operators with several implementations. `kernels` holds the chosen ones."""

    kernels: Kernels = Kernels()


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Set the operators of every module of `model` that calls operators."""
    for module in model.modules():
        if isinstance(module, Computed):
            module.kernels = kernels


class ShardedModule(Computed):
    """A module that may need data from other shards. It calls its `exchange` (on one device a `LocalExchange`) as its `plan`
    says.
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


class SubLayer(ShardedModule):
    """A sub-layer of a block: `forward` takes a `Sharded` representation and returns the `Update` of one.

    The axes tell the representations: `seq` and `res` are those of the MSA, `i` and `j` those of the pair. A block sends a
    representation where the next sub-layer takes it. Where a sub-layer takes either axis, the representation stays.
    """

    reads: tuple[Axis, ...] = ()
    """Axes of the other representation from which `bias` projects, before `forward`, its second argument."""
    shared_axis: Axis | None = None
    """Axis along which dropout of the update has one mask; None: there is no dropout."""

    @property
    def takes(self) -> tuple[Axis, ...]:
        """Axes along which the input may be sharded: one, or both of a representation. Each class says its own."""
        return ()

    @property
    def leaves(self) -> tuple[Axis, ...]:
        """Axes along which the update may be sharded, if they are not those that it takes. If they are of the same
        representation, `forward` gets as second argument the representation on its way to one of them."""
        return ()


class Budgeted(ShardedModule):
    """A module that keeps to a memory budget in passes without gradients."""

    memory: int | None = None
    """Bytes for the intermediates of a sub-layer, on each rank; None: no limit, and nothing is computed in place."""
    samples: int | None = None
    """`samples` of this module's `Budget`."""
    projects_again: bool = False
    """Whether the backward pass computes the projections of attention again instead of keeping them."""

    @property
    def budget(self) -> Budget:
        """The budget of a pass without gradients; with gradients there is no limit."""
        if torch.is_grad_enabled():
            return PROJECTING_AGAIN if self.projects_again else NO_LIMIT
        if self.memory is None:
            return NO_LIMIT
        return Budget(self.memory, self.exchange.ranks, self.samples)

    def sharded(self, x: Float[Tensor, "B n1 n2 c"], axis: Axis, mask: Mask) -> Sharded:
        """A representation of which this rank has the shard `x` along `axis`. `mask`: mask of the whole representation."""
        return Sharded(x, axis, mask, self.exchange, self.budget)


def use_memory(model: nn.Module, memory: int | None, samples: int | None = None) -> None:
    """Let passes of `model` without gradients compute in place, with `memory` bytes for a sub-layer's intermediates on each
    rank. A stack that is called by itself then overwrites its inputs. None sets no limit. `samples`: see `Budget`.
    """
    for module in model.modules():
        if isinstance(module, Budgeted):
            module.memory, module.samples = memory, samples


def working_width(layer: nn.Module) -> int:
    """Estimated intermediate elements of `layer` per position: the outputs of all norms and linear layers, and the widest
    input.
    """
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    norms = [module for module in layer.modules() if isinstance(module, nn.LayerNorm)]
    return (
        sum(one.out_features for one in linears)
        + sum(one.normalized_shape[0] for one in norms)
        + max(one.in_features for one in linears)
    )


def widest(part: nn.Module, name: str = "working_width") -> int:
    """The largest number of intermediate elements per position that a layer of `part` has. `name`: its attribute."""
    return max(int(getattr(module, name, 0)) for module in part.modules())


class Linear(nn.Linear):
    """Linear layer with AF2's initialisations (supplement 1.11.4).

    `linear`: LeCun normal, truncated; `relu`: He normal, truncated (before a ReLU); `glorot`: Glorot uniform (queries, keys,
    values; `parts`: how many of them share one matrix); `gate`: weight 0 and bias 1, so that gates start open; `final`:
    zero, so that every residual branch starts as the identity.
    """

    computes_in_float32 = False
    """Whether the parameters are used in float32 also under autocast; they are then not cast (`evodsp.model.precision`)."""

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

    @property
    def layer(self) -> Layer:
        """Weight and bias, as operators take them."""
        return self.weight, self.bias


class LayerNorm(Computed, nn.LayerNorm):
    """Layer norm over the last axis. The result has the precision of `x`, also under autocast; statistics are in float32."""

    computes_in_float32 = False
    """Whether `x` is in float32 also under autocast; the parameters are then not cast (`evodsp.model.precision`)."""

    def forward(self, x: Float[Tensor, "*batch c"]) -> Float[Tensor, "*batch c"]:
        with without_autocast(x.device):
            return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


def project(
    kernels: Kernels, x: Float[Tensor, "B n1 n2 c"], norm: LayerNorm, *layers: Layer, planes: int = 0
) -> tuple[Float[Tensor, "B n1 n2 _"], ...]:
    """The linear `layers` of the layer norm of x. The norm is recomputed in the backward pass instead of kept. The results of
    the last `planes` layers are stored channels-first.
    """
    results = kernels.projections(
        x, norm.weight, norm.bias, [weight for weight, _ in layers], [bias for _, bias in layers], planes
    )
    last = len(layers) - planes
    return *results[:last], *(result.permute(0, 2, 3, 1) for result in results[last:])


def project_rows(kernels: Kernels, x: Sharded, norm: LayerNorm, layer: Layer) -> Float[Tensor, "B n1 n2 _"] | Unmade:
    """The linear `layer` of the layer norm of a representation: computed at once or, with a memory budget, when rows are
    read.
    """

    def rows(part: Float[Tensor, "B n1 n2 c"]) -> Float[Tensor, "B n1 n2 _"]:
        return project(kernels, part, norm, layer)[0]

    return Unmade(x.x, rows) if x.in_pieces else rows(x.x)


def project_rows_and_whole(
    kernels: Kernels, x: Sharded, norm: LayerNorm, layer: Layer, whole: Layer, width: int, dim: int
) -> tuple[Float[Tensor, "B n1 n2 _"] | Unmade, Float[Tensor, "B n1 n2 _"]]:
    """`project_rows` of `layer`, and the result of the layer `whole` for all rows. Without a budget one operator computes
    both, and the result of `whole` is stored channels-first. `width`, `dim`: see `Sharded.collect`.
    """
    if not x.in_pieces:
        rows, of_all = project(kernels, x.x, norm, layer, whole, planes=1)
        return rows, of_all
    of_all = x.collect(lambda part: project(kernels, part, norm, whole)[0], x.x, width=width, dim=dim)
    return project_rows(kernels, x, norm, layer), of_all


class PairBias:
    """The bias of attention that is projected from the pair representation. It is gathered while other projections are
    computed.

    With `plan.stream_bias`, or if the memory budget does not hold it, it is never whole. Queries are then processed shard by
    shard, each with the broadcast bias of its rows; the backward pass broadcasts it again.
    """

    def __init__(self, local: Float[Tensor, "B _ _ H"], axis: Axis, pair: Sharded, plan: CommunicationPlan) -> None:
        """`local`: this rank's shard of the bias along `axis`. Axis 1 holds queries and axis 2 keys; each is as long as an
        axis of the whole pair.
        """
        self.whole, self.exchange = pair.total_sizes[0], pair.exchange
        needed = local.shape[0] * self.whole**2 * local.shape[-1] * local.element_size()
        self.stream = plan.stream_bias or (self.exchange.ranks > 1 and not pair.budget.holds(needed))
        arriving: Pending = Ready(local)
        if not self.stream:
            arriving = self.exchange.start_gather(local, axis, self.whole)
        elif axis == "j":
            arriving = self.exchange.start_switch(local, "j", "i", self.whole)
        self._arriving = Shared(arriving)  # all pieces of a representation read it

    def attention(
        self,
        kernels: Kernels,
        projected: Float[Tensor, "B N L 4 H D"],
        keys: Float[Tensor, "B N L"],
    ) -> Float[Tensor, "B N L H D"]:
        """Gated attention with this bias. `keys`: 1 where a key is present."""
        bias = self._arriving.wait()
        if not self.stream:
            return kernels.biased_attention(projected, keys, bias.permute(0, 3, 1, 2))
        rows = [
            checkpoint(
                self._rows,
                kernels,
                root,
                projected,
                keys,
                bias,
                queries.start,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for root, queries in enumerate(self.exchange.shards(self.whole))
        ]
        return torch.cat(rows, 2)

    def _rows(self, kernels: Kernels, root: int, projected: Tensor, keys: Tensor, local: Tensor, first: int) -> Tensor:
        bias = self.exchange.start_broadcast(local, "i", root, self.whole).wait()
        return kernels.biased_attention(projected, keys, bias.permute(0, 3, 1, 2), first)


class GatedAttention(Computed):
    """Gated multi-head self-attention along one axis (the core of algorithms 7, 8, 13 and 14).

    The caller computes the layer norm before it, because the pair bias may be projected from the same norm.
    """

    def __init__(self, channels: int, heads: int, head_width: int, along: Literal[1, 2] = 2) -> None:
        """`along`: dimension of the positions that attend to each other. The other one holds independent rows."""
        super().__init__()
        self.heads, self.along = heads, along
        width = heads * head_width
        self.qkv = Linear(channels, 3 * width, bias=False, init="glorot", parts=3)
        self.gate = Linear(channels, width, init="gate")
        self.output = Linear(width, channels, init="final")
        self.working_width = working_width(self)

    @property
    def rows(self) -> int:
        """The dimension along which the independent rows lie."""
        return 3 - self.along

    @property
    def projection(self) -> Layer:
        """Queries, keys, values and gates as one layer: one large matrix product, and one gradient."""
        return torch.cat([self.qkv.weight, self.gate.weight]), self.gate.bias

    def update(
        self,
        x: Sharded,
        norm: LayerNorm,
        layer: Layer,
        projected: Float[Tensor, "B n1 n2 _"] | Unmade,
        pair_bias: PairBias | None = None,
        width: int | None = None,
    ) -> Update:
        """The update of x. `projected`: `layer`, which is `projection`, of the `norm` of x. `width`: see `Sharded.update`."""
        attend = partial(self, pair_bias=pair_bias)
        if x.budget.projects_again:
            attend = partial(computed_again, attend, partial(self._projected, x.x, norm, layer))
        return x.update(attend, projected, x.own_mask, width=width or self.working_width, dim=self.rows)

    def _projected(self, x: Float[Tensor, "B n1 n2 c"], norm: LayerNorm, layer: Layer) -> Float[Tensor, "B n1 n2 _"]:
        return project(self.kernels, x, norm, layer)[0]

    def forward(
        self,
        projected: Float[Tensor, "B n1 n2 _"],
        mask: Float[Tensor, "B n1 n2"],
        pair_bias: PairBias | None = None,
    ) -> Float[Tensor, "B n1 n2 c"]:
        """`projected`: result of `projection`. `pair_bias`: bias that all rows share; it may still be on its way."""
        projected = projected.unflatten(-1, (4, self.heads, -1))
        if self.along == 1:  # views: operators take any strides
            projected, mask = projected.transpose(1, 2), mask.transpose(1, 2)
        attention = self.kernels.attention if pair_bias is None else partial(pair_bias.attention, self.kernels)
        o = attention(projected, mask)
        if self.along == 1:
            o = o.transpose(1, 2)
        return self.kernels.linear(o.flatten(-2), self.output.weight, self.output.bias)


class Transition(SubLayer):
    """Two-layer perceptron (algorithms 9 and 15)."""

    takes: tuple[Axis, ...] = ("i", "j")

    def __init__(self, channels: int, factor: int, takes: tuple[Axis, ...] = ("i", "j")) -> None:
        super().__init__()
        self.takes = takes
        self.norm = LayerNorm(channels)
        self.widen = Linear(channels, factor * channels, init="relu")
        self.narrow = Linear(factor * channels, channels, init="final")
        self.working_width = working_width(self)

    def forward(self, representation: Sharded) -> Update:
        return representation.update(self._rows, representation.x, width=self.working_width)

    def _rows(self, x: Float[Tensor, "B n1 n2 c"]) -> Float[Tensor, "B n1 n2 c"]:
        layers = self.norm, self.widen, self.narrow
        return self.kernels.transition(x, *(p for layer in layers for p in (layer.weight, layer.bias)))
