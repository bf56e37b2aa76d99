"""DSP with torch's DistributedDataParallel.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.ddp --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from evodsp.parallel import init_mesh, parallelize

from .model import LAYOUT, MAX_NORM, STAGES, STEPS, batch, new_model
from .ranks import Result, mean_over_ranks, run


def train(sequence: int) -> Result:
    """Train with `sequence` ranks a sample."""
    mesh = init_mesh(sequence)
    model = parallelize(new_model(), mesh, LAYOUT, STAGES, region="blocks")
    ddp = DistributedDataParallel(model)  # averages gradients over ALL ranks
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, mesh.data_rank, mesh.data)  # the ranks of a sequence group take the same samples
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, dict(model.named_parameters())


if __name__ == "__main__":
    run(train)
