"""DSP with FSDP2: every rank holds a shard of each parameter, of its gradient and of the optimizer's state.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.fsdp2 --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from evodsp.parallel import init_mesh, parallelize

from .model import LAYOUT, MAX_NORM, STAGES, STEPS, batch, new_model
from .ranks import Result, mean_over_ranks, run


def train(sequence: int, reshard_after_forward: bool = True) -> Result:
    """Train with `sequence` ranks a sample. `reshard_after_forward`: ZeRO-3; without it ZeRO-2."""
    mesh = init_mesh(sequence)
    model = parallelize(new_model(), mesh, LAYOUT, STAGES, region="blocks")
    for module in (*model.blocks, model):  # shards over ALL ranks, and averages gradients over them
        fully_shard(module, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, mesh.data_rank, mesh.data)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


if __name__ == "__main__":
    run(train)
