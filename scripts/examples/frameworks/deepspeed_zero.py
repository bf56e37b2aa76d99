"""DSP with DeepSpeed's ZeRO: each rank holds the optimizer's state of some parameters, and in stage 2 their gradients.

    torchrun --nproc-per-node 4 -m scripts.examples.frameworks.deepspeed_zero --sequence 2

docs/frameworks.md explains it.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.nn.functional as F

from evodsp.parallel import init_mesh, parallelize

from .model import LAYOUT, MAX_NORM, SAMPLES, STAGES, STEPS, batch, new_model
from .ranks import Result, mean_over_ranks, run


def train(sequence: int, stage: int = 2) -> Result:
    """Train with `sequence` ranks a sample. `stage`: of ZeRO, 1 or 2."""
    mesh = init_mesh(sequence)
    model = parallelize(new_model(), mesh, LAYOUT, STAGES, region="blocks")
    engine, *_ = deepspeed.initialize(  # without `mpu` and `sequence_parallel_size`: averages gradients over ALL ranks
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES // mesh.data,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": stage},
        },
    )
    losses = []
    for step in range(STEPS):
        x, y = batch(step, mesh.data_rank, mesh.data)
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
    return losses, dict(model.named_parameters())


def without_compiler() -> None:
    """Leave collectives on a CPU to gloo. DeepSpeed would compile its own, for shared memory, which takes minutes."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    without_compiler()
    run(train)
