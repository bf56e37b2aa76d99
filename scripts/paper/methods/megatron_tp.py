"""Megatron-LM's tensor parallelism: each rank has 1/N of the heads and of the MLP's hidden layer, and all of the sequence.

The first linear layer of an attention or MLP is cut by output channels, the second one by input channels. The second one's
results are partial sums: an all-reduce adds them, 2 per block. In the backward pass the gradients of the first one's input
are partial sums: an all-reduce each again.

Source: NVIDIA/Megatron-LM, megatron/core/tensor_parallel/layers.py: `LinearWithGradAccumulationAndAsyncCommunication` launches
the backward all-reduce before it computes the weight's gradient; mappings.py: `_reduce` adds in place.

As there, every rank must compute the same loss: the gradient that reaches the last layer is taken as it is on each rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.parallel.collectives import shard_slice
from evodsp.parallel.group import Group, Phase

from ..config import TransformerConfig
from ..transformer import Transformer
from .base import Counts, Groups, Method, Parallel, must_divide


class CutLinear(nn.Module, ABC):
    """This rank's slice of a linear layer's parameters."""

    cut: dict[str, int]
    """Dimension along which a parameter is cut, by its name. The others are whole."""
    weight: Tensor
    bias: Tensor

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        for name, parameter in whole.named_parameters():
            mine = parameter.detach()
            if name in self.cut:
                part = shard_slice(mine.shape[self.cut[name]], group.size, group.rank)
                mine = mine[(slice(None),) * self.cut[name] + (part,)].clone()
            self.register_parameter(name, nn.Parameter(mine, parameter.requires_grad))

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the layer, and its communication."""


class ColumnLinear(CutLinear):
    """1/N of the output channels, from an input that every rank holds."""

    cut = {"weight": 0, "bias": 0}  # noqa: RUF012  (a constant of the class)

    def forward(self, x: Float[Tensor, "B *axes C"]) -> Float[Tensor, "B *axes C_local"]:
        return _ColumnLinear.apply(x, self.weight, self.bias, self.group)


class RowLinear(CutLinear):
    """All output channels, from 1/N of the input channels. The bias is whole, and added after the sum over ranks."""

    cut = {"weight": 1}  # noqa: RUF012

    def forward(self, x: Float[Tensor, "B *axes C_local"]) -> Float[Tensor, "B *axes C"]:
        return _RowLinear.apply(x, self.weight, self.group) + self.bias


class TensorParallelMethod(Method):
    """A method that cuts the linear layers of all blocks."""

    column: type[CutLinear]
    """Takes the place of each attention's and MLP's first linear layer."""
    row: type[CutLinear]
    """Takes the place of the second one."""

    def cut_linears(self, model: Transformer, group: Group) -> None:
        """Replace the linear layers of all blocks."""
        self.check_model(model.config, group.size)
        for axis in model.config.axes:
            for block in model.blocks_along(axis):
                for first, second, module in (("qkv", "out", block.attention), ("up", "down", block.mlp)):
                    setattr(module, first, self.column(getattr(module, first), group))
                    setattr(module, second, self.row(getattr(module, second), group))

    def check_model(self, config: TransformerConfig, ranks: int) -> None:
        # The MLP's hidden layer is a multiple of the heads, and then divisible too.
        must_divide(ranks, config.heads, "the number of heads", self.name)

    def partition(self, parallel: Parallel) -> dict[str, int]:
        return {
            f"{path}.{name}": dim
            for path, module in parallel.model.named_modules()
            if isinstance(module, CutLinear)
            for name, dim in module.cut.items()
        }


class MegatronTP(TensorParallelMethod):
    """Megatron-LM's tensor parallelism."""

    name, title = "megatron_tp", "Megatron-LM"
    column, row = ColumnLinear, RowLinear

    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        self.cut_linears(model, groups.layers)
        return Parallel(model, self, groups)

    def layer_traffic(self, phase: Phase) -> Counts:
        return {"all-reduce": 4}


def parameter_gradients(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a linear layer's weight and bias."""
    rows = gradient.flatten(0, -2)
    return rows.mT @ x.flatten(0, -2), rows.sum(0)


def _start_sum(x: Tensor, group: Group, backward: bool) -> Any:
    """Begin to add `x` over the ranks, in place: a copy, as `Sum` makes it, would be charged to Megatron's memory."""
    if group.ledger is not None:
        group.ledger.add("all-reduce", 2 * x.numel(), x.element_size(), backward)
    return group.all_reduce(x)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        to_input = gradient @ weight
        work = _start_sum(to_input, ctx.group, backward=True)
        to_weight, to_bias = parameter_gradients(gradient, x)
        work.wait()
        return to_input, to_weight, to_bias, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        total = F.linear(x, weight)
        _start_sum(total, group, backward=False).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, parameter_gradients(gradient, x)[0], None
