"""DSP with torch.distributed.pipelining: two stages of several ranks each; ranks send their shards from stage to stage.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.pipeline --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from evodsp.parallel import average_gradients, gather, split, switch

from .model import SAMPLES, SPACE, STEPS, TIME, Block, SpaceTimeTransformer, batch, new_model
from .ranks import Result, run


class Half(nn.Module):
    """The first or the second half of the model. Between blocks and between halves x is sharded along time."""

    def __init__(self, model: SpaceTimeTransformer, half: int, mesh: DeviceMesh) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        self.embed = model.embed if half == 0 else None
        self.blocks = nn.ModuleDict({str(n): b for n, b in enumerate(model.blocks) if (n >= middle) == (half == 1)})
        self.head = model.head if half == 1 else None
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = split(self.embed(x), 1, self.mesh)
        for block in self.blocks.values():
            assert isinstance(block, Block)
            x = x + block.spatial(x)
            x = switch(x, 1, 2, TIME, self.mesh)
            x = x + block.temporal(x)
            x = x + block.transition(x)
            x = switch(x, 2, 1, SPACE, self.mesh)
        if self.head is not None:
            x = self.head(gather(x, 1, TIME, self.mesh))
        return x


def train(sequence: int) -> Result:
    """Train with 2 x `sequence` ranks. Returns the parameters of this rank's half; the second half returns losses."""
    mesh = init_device_mesh("cpu", (2, sequence), mesh_dim_names=("pipeline", "sequence"))
    half = mesh.get_local_rank("pipeline")
    model = Half(new_model(), half, mesh["sequence"])
    stage = PipelineStage(model, half, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, n_microbatches=SAMPLES, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        parts: list[Tensor] = []
        if half == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=parts)
        average_gradients(model.parameters(), mesh["sequence"])  # no DDP here: the mean over a stage's ranks
        optimizer.step()
        optimizer.zero_grad()
        if parts:
            losses.append(torch.stack(parts).mean().item())
    return losses, dict(model.named_parameters())


if __name__ == "__main__":
    run(train)
