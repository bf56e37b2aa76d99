"""The learning rate as a function of the samples (supplement 1.11.3): warm-up, then constant with one drop, or a cosine."""

from __future__ import annotations

import math

from evodsp.training.config import OptimizerConfig


def learning_rate(sample: int, batch: int, config: OptimizerConfig, total_samples: int) -> float:
    """Learning rate of the optimizer step of samples `sample` (from 0) to `sample` + `batch` - 1, in a run of
    `total_samples`."""
    warmup = config.warmup_samples
    if sample < warmup:
        # The rate of the first step is above zero; the last step of the warm-up has the full rate.
        return config.lr * min(sample + batch, warmup) / warmup
    if config.schedule == "constant":
        return config.lr * (config.drop_factor if sample >= config.drop_samples else 1.0)
    # The last step has exactly `final_lr`.
    progress = min(1.0, (sample - warmup) / max(1, total_samples - batch - warmup))
    return config.final_lr + (config.lr - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2
