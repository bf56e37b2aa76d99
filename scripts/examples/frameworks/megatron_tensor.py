"""DSP with the tensor parallel layers of Megatron-core: heads and hidden channels over one group, positions over another.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.megatron_tensor --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evodsp.parallel import parallelize

from .model import LAYOUT, STAGES, STEPS, Attention, SpaceTimeTransformer, Transition, batch, new_model
from .ranks import Result, mean_over_ranks, run

TENSOR = 2
"""Ranks that share a head or a hidden channel of the transition."""
OPTIONS = {
    "config": ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float64),
    "init_method": nn.init.zeros_,
    "skip_bias_add": False,
}


class Column(ColumnParallelLinear):
    """A part of a linear layer's outputs. Megatron's layers take [..., channel] with at most two axes before the channel."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(*whole.weight.shape[::-1], bias=whole.bias is not None, gather_output=False, **OPTIONS)
        _copy(whole, self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2))[0].unflatten(0, x.shape[:-1])


class Row(RowParallelLinear):
    """A part of a linear layer's inputs; the results are summed over the tensor parallel group."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(*whole.weight.shape[::-1], bias=whole.bias is not None, input_is_parallel=True, **OPTIONS)
        _copy(whole, self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2))[0].unflatten(0, x.shape[:-1])


def _copy(whole: nn.Linear, part: nn.Module) -> None:
    """Fill a rank's part of a layer. Weights are cut along their only axis that is shorter; a row layer's bias is whole."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for own, values in zip(part.parameters(), whole.parameters(), strict=True):
        for dim in range(values.ndim):
            if own.shape[dim] < values.shape[dim]:
                values = values.chunk(TENSOR, dim)[rank]
        own.data.copy_(values)


def tensor_parallel(model: SpaceTimeTransformer) -> SpaceTimeTransformer:
    """The model with its linear layers divided as in Megatron-LM: columns, then rows."""
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.heads //= TENSOR
            module.qkv, module.out = Column(module.qkv), Row(module.out)
        elif isinstance(module, Transition):
            module.wide, module.out = Column(module.wide), Row(module.out)
    return model


def train(sequence: int) -> Result:
    """Train with `TENSOR` x `sequence` ranks a sample. Returns this rank's part of the parameters."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR, context_parallel_size=sequence)
    model = tensor_parallel(new_model())
    # Megatron's context parallel group shares the samples, and DSP shards them.
    parallelize(model, parallel_state.get_context_parallel_group(), LAYOUT, STAGES, region="blocks")
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)  # all that hold the same parameters
    ddp = DistributedDataParallel(model, process_group=ranks)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    data_rank, data_ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses = []
    for step in range(STEPS):
        x, y = batch(step, data_rank, data_ranks)
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    parallel_state.destroy_model_parallel()
    return losses, dict(model.named_parameters())


if __name__ == "__main__":
    run(train)
