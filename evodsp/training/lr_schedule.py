"""The learning rate as a function of the step (supplement 1.11.3): warm-up, then constant with one drop, or a cosine."""

from __future__ import annotations

import math

from evodsp.training.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) in a run of `total_steps`."""
    warmup = config.warmup_steps
    if step < warmup:
        # The rate of the first step is above zero; the last step of the warm-up has the full rate.
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr * (config.drop_factor if step >= config.drop_step else 1.0)
    # The last step, total_steps - 1, has exactly `final_lr`.
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    return config.final_lr + (config.lr - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2
