"""DSP with Hugging Face Accelerate.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.accelerate_ddp --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset

from evodsp.parallel import init_mesh, parallelize

from .model import LAYOUT, MAX_NORM, SAMPLES, STAGES, STEPS, batch, new_model
from .ranks import Result, mean_over_ranks, run


def train(sequence: int) -> Result:
    """Train with `sequence` ranks a sample."""
    accelerator = Accelerator(cpu=True)
    mesh = init_mesh(sequence)
    model = parallelize(new_model(), mesh, LAYOUT, STAGES, region="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)  # DDP over ALL ranks
    samples = TensorDataset(*(torch.cat(parts) for parts in zip(*map(batch, range(STEPS)), strict=True)))
    loader = prepare_data_loader(  # not accelerator.prepare(loader), which would give every rank other samples
        DataLoader(samples, batch_size=SAMPLES // mesh.data), num_processes=mesh.data, process_index=mesh.data_rank
    )
    losses = []
    for x, y in loader:
        loss = F.mse_loss(prepared(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, dict(model.named_parameters())


if __name__ == "__main__":
    run(train)
