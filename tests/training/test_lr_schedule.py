from __future__ import annotations

import math

import pytest

from evodsp.errors import UserError
from evodsp.training.config import OptimizerConfig
from evodsp.training.lr_schedule import learning_rate


def test_the_warm_up_is_linear_and_its_first_step_learns() -> None:
    """A warm-up from exactly zero wastes a step; one off by a step never reaches the full rate."""
    config = OptimizerConfig(lr=1e-3, warmup_steps=4)
    rates = [learning_rate(step, config, 100) for step in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_the_constant_schedule_drops_once() -> None:
    """A drop applied at every multiple of its step, or one step late."""
    config = OptimizerConfig(lr=1.0, warmup_steps=0, drop_step=10, drop_factor=0.95)
    assert [learning_rate(step, config, 100) for step in (0, 9, 10, 20, 1000)] == pytest.approx(
        [1, 1, 0.95, 0.95, 0.95]
    )


def test_the_cosine_goes_from_the_full_rate_to_the_final_one() -> None:
    """A cosine that ends above its floor, or rises again beyond its end."""
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule="cosine", final_lr=0.1)
    assert learning_rate(10, config, 111) == 1.0
    assert learning_rate(60, config, 111) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert learning_rate(110, config, 111) == learning_rate(500, config, 111) == pytest.approx(0.1)


def test_no_warm_up_and_a_run_no_longer_than_the_warm_up_divide_by_nothing() -> None:
    """Division by zero in degenerate configs."""
    assert learning_rate(0, OptimizerConfig(lr=1.0, warmup_steps=0), 1) == 1.0
    config = OptimizerConfig(lr=1.0, warmup_steps=5, schedule="cosine")
    assert learning_rate(5, config, 5) >= 0


def test_a_negative_learning_rate_is_refused() -> None:
    with pytest.raises(UserError, match="lr is -1"):
        OptimizerConfig(lr=-1.0)
