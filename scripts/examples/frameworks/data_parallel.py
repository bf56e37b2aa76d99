"""DSP with what torch has for data parallelism: DistributedDataParallel, ZeRO-1 and FSDP2.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.data_parallel --framework ddp --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from evodsp.parallel import init_mesh, parallelize

from .model import LAYOUT, MAX_NORM, STAGES, STEPS, SpaceTimeTransformer, batch, new_model
from .ranks import Result, mean_over_ranks, run


def ddp(model: SpaceTimeTransformer) -> tuple[nn.Module, Optimizer]:
    """Parameters and the optimizer's state are whole on every rank."""
    wrapped = DistributedDataParallel(model)  # averages gradients over ALL ranks
    return wrapped, AdamW(wrapped.parameters(), lr=0.01)


def zero1(model: SpaceTimeTransformer) -> tuple[nn.Module, Optimizer]:
    """Each rank holds the optimizer's state of some parameters."""
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=0.01)  # divides its state among ALL ranks


def fsdp2(model: SpaceTimeTransformer, reshard_after_forward: bool = True) -> tuple[nn.Module, Optimizer]:
    """Each rank holds a shard of each parameter, of its gradient and of the optimizer's state."""
    for module in (*model.blocks, model):  # shards over ALL ranks, and averages gradients over them
        fully_shard(module, reshard_after_forward=reshard_after_forward)
    return model, AdamW(model.parameters(), lr=0.01)


FRAMEWORKS: dict[str, Callable[[SpaceTimeTransformer], tuple[nn.Module, Optimizer]]] = {
    "ddp": ddp, "zero1": zero1, "fsdp2": fsdp2, "fsdp2-zero2": partial(fsdp2, reshard_after_forward=False)
}  # fmt: skip


def train(sequence: int, framework: str = "ddp") -> Result:
    """Train with `sequence` ranks a sample."""
    mesh = init_mesh(sequence)
    model = parallelize(new_model(), mesh, LAYOUT, STAGES, region="blocks")
    wrapped, optimizer = FRAMEWORKS[framework](model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, mesh.data_rank, mesh.data)  # the ranks of a sequence group take the same samples
        loss = F.mse_loss(wrapped(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


if __name__ == "__main__":
    run(train, FRAMEWORKS)
