"""The recipe in samples: how the samples of a step are divided on a mesh, and the learning rate of each sample.

A recipe counts in samples: the global batch, the learning rate's schedule, the epochs, the length of a run. So it means the
same on any number of ranks. Optimizer steps follow from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evodsp.errors import UserError
from evodsp.printing import counted
from evodsp.training.config import OptimizerConfig


@dataclass(frozen=True)
class Batching:
    """How the samples of one optimizer step are divided."""

    data_ranks: int
    """The number of ranks, or of groups of ranks that share a sample, which compute different samples at a time."""
    batch_size: int
    """The number of samples that each of them has in one batch."""
    accumulate: int
    """The number of batches in one step."""

    @property
    def samples(self) -> int:
        """Samples of one optimizer step: the global batch."""
        return self.data_ranks * self.batch_size * self.accumulate

    def steps(self, samples: int) -> int:
        """Optimizer steps after which at least `samples` samples were taken."""
        return math.ceil(samples / self.samples)

    def batches(self, samples: int) -> int:
        """Batches of a data rank in these steps."""
        return self.steps(samples) * self.accumulate

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} a step: data ranks {self.data_ranks} x data.batch_size {self.batch_size} x "
            f"accumulated batches {self.accumulate}"
        )


def batching(global_batch: int | None, data_ranks: int, batch_size: int, accumulate: int) -> Batching:
    """The division of `global_batch` samples; None: `accumulate` batches a step, of `batch_size` samples on each data rank.

    `accumulate`: trainer.accumulate_grad_batches. Raises UserError if `global_batch` does not divide, or if both are given.
    """
    if global_batch is None:
        return Batching(data_ranks, batch_size, accumulate)
    if accumulate != 1:
        raise UserError(
            f"global_batch is {global_batch}, which sets how many batches are accumulated, but "
            f"trainer.accumulate_grad_batches is {accumulate}; give one of them"
        )
    at_once = data_ranks * batch_size
    if global_batch % at_once:
        raise UserError(
            f"global_batch is {global_batch}, but must be a multiple of {at_once} (data ranks {data_ranks} x data.batch_size "
            f"{batch_size}); use another global_batch, data.batch_size, parallel.sequence or number of devices"
        )
    return Batching(data_ranks, batch_size, global_batch // at_once)


def learning_rate(sample: int, batch: int, config: OptimizerConfig, total_samples: int) -> float:
    """Learning rate (supplement 1.11.3): a warm-up, then constant with one drop, or a cosine.

    It holds for the optimizer step of samples `sample` (from 0) to `sample` + `batch` - 1, in a run of
    `total_samples`.
    """
    warmup = config.warmup_samples
    if sample < warmup:
        # The rate of the first step is above zero; the last step of the warm-up has the full rate.
        return config.lr * min(sample + batch, warmup) / warmup
    if config.schedule == "constant":
        return config.lr * (config.drop_factor if sample >= config.drop_samples else 1.0)
    # The last step has exactly `final_lr`.
    progress = min(1.0, (sample - warmup) / max(1, total_samples - batch - warmup))
    return config.final_lr + (config.lr - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2
