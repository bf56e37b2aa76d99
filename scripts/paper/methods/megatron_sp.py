"""Megatron's sequence parallelism: tensor parallelism, with the sequence sharded where Megatron-LM holds all of it.

Norms, dropout and residuals run on 1/N of the time steps. Before an attention or MLP an all-gather collects the sequence, and
after it a reduce-scatter adds the partial sums and shards them again: 4 of each per layer. In the backward pass each becomes
the other, and each all-gather of the forward pass is done again: the first linear layer keeps its sharded input only, and
needs the gathered one for its weight's gradient.

Source: NVIDIA/Megatron-LM, megatron/core/tensor_parallel/layers.py, `LinearWithGradAccumulationAndAsyncCommunication`: the
backward pass gathers the input again while it computes the input's gradient, and scatters that while it computes the weight's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from evodsp.parallel.collectives import Gather, ScatterSum, shard_sizes
from evodsp.parallel.exchange import start
from evodsp.parallel.group import Group, Phase

from ..transformer import Transformer
from .base import Counts, Groups, Parallel
from .megatron_tp import ColumnLinear, RowLinear, TensorParallelMethod, parameter_gradients
from .time_sharded import TIME, EmbeddedMethod, TimeSharded


class GatheringLinear(ColumnLinear):
    """1/N of the output channels for the whole sequence, from an input that is sharded along time."""

    def forward(self, x: Float[Tensor, "B T_local *axes C"]) -> Float[Tensor, "B T *axes C_local"]:
        return _GatheringLinear.apply(x, self.weight, self.bias, self.group)


class ScatteringLinear(RowLinear):
    """All output channels, sharded along time, from 1/N of the input channels for the whole sequence."""

    def forward(self, x: Float[Tensor, "B T *axes C_local"]) -> Float[Tensor, "B T_local *axes C"]:
        sizes = shard_sizes(x.shape[TIME], self.group.size)
        return start(F.linear(x, self.weight), ScatterSum(self.group, TIME, sizes)).wait() + self.bias


class MegatronSP(EmbeddedMethod, TensorParallelMethod):
    """Megatron's sequence parallelism."""

    name, title = "megatron_sp", "Megatron-SP"
    column, row = GatheringLinear, ScatteringLinear

    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        self.cut_linears(model, groups.layers)
        return TimeSharded(model, self, groups)

    def layer_traffic(self, phase: Phase) -> Counts:
        """torch ends a recomputation when it has all that the backward pass needs: without dropout, before a block's last
        reduce-scatter."""
        return {
            "all-gather": 8 if phase == "backward" else 4,
            "reduce-scatter": 2 if phase == "recompute" else 4,
        }

    def reduce_gradients(self, parallel: Parallel) -> None:
        """A slice's gradient is the sum over the ranks' losses; the loss is their mean."""
        super().reduce_gradients(parallel)
        cut = self.partition(parallel)
        for name, parameter in parallel.model.named_parameters():
            if name in cut and parameter.grad is not None:
                parameter.grad /= parallel.groups.size


class _GatheringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(_gather(x, group).launch(x).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gather = _gather(x, ctx.group)
        gathering = gather.launch(x, backward=True)
        to_whole_input = gradient @ weight
        whole = gathering.wait()
        scattering = gather.transpose().launch(to_whole_input, backward=True)
        to_weight, to_bias = parameter_gradients(gradient, whole)
        return scattering.wait(), to_weight, to_bias, None


def _gather(x: Tensor, group: Group) -> Gather:
    """The all-gather of shards of equal size along time."""
    return Gather(group, TIME, (x.shape[TIME],) * group.size)
