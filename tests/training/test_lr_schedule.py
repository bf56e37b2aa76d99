from __future__ import annotations

import math

import pytest

from evodsp.errors import UserError
from evodsp.training.config import OptimizerConfig
from evodsp.training.gradients import learning_rate


def rates(config: OptimizerConfig, steps: list[int], batch: int = 1, total: int = 100) -> list[float]:
    """The learning rates of optimizer steps, in a run of `total` steps of `batch` samples."""
    return [learning_rate(step * batch, batch, config, total * batch) for step in steps]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_warm_up_is_linear_and_its_first_step_learns(batch: int) -> None:
    """A warm-up from exactly zero wastes a step; one off by a step never reaches the full rate."""
    config = OptimizerConfig(lr=1e-3, warmup_samples=4 * batch)
    assert rates(config, [0, 1, 2, 3, 4, 5], batch) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_alphafolds_schedule_on_any_global_batch(batch: int) -> None:
    """A schedule that counts steps, or batches of a rank: eight times as many data ranks would warm up eight times as long.
    Supplement 1.11.3: 1e-3 after 128,000 samples, 0.95 of that from 6.4 million on."""
    expected = {63_872: 0.5e-3, 128_000: 1e-3, 6_399_872: 1e-3, 6_400_000: 0.95e-3, 9_999_872: 0.95e-3}
    for sample, rate in expected.items():
        assert sample % batch == 0
        [found] = rates(OptimizerConfig(), [sample // batch], batch)
        assert found == pytest.approx(rate, rel=128 / 64_000)


def test_the_constant_schedule_drops_once() -> None:
    """A drop applied at every multiple of its sample, one step late, or one step early where a step goes across it."""
    config = OptimizerConfig(lr=1.0, warmup_samples=0, drop_samples=10, drop_factor=0.95)
    assert rates(config, [0, 9, 10, 20, 1000]) == pytest.approx([1, 1, 0.95, 0.95, 0.95])
    assert rates(config, [0, 4, 5, 10], batch=2) == pytest.approx([1, 1, 0.95, 0.95])
    assert rates(config, [1, 2, 3], batch=4) == pytest.approx([1, 1, 0.95]), "of the first step that begins after it"


@pytest.mark.parametrize("batch", [1, 4])
def test_the_cosine_goes_from_the_full_rate_to_the_final_one(batch: int) -> None:
    """A cosine that ends above its floor, or rises again beyond its end."""
    config = OptimizerConfig(lr=1.0, warmup_samples=10 * batch, schedule="cosine", final_lr=0.1)
    first, middle, last, beyond = rates(config, [10, 60, 110, 500], batch, total=111)
    assert first == 1.0
    assert middle == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert last == beyond == pytest.approx(0.1)


def test_no_warm_up_and_a_run_no_longer_than_the_warm_up_divide_by_nothing() -> None:
    """Division by zero in degenerate configs."""
    assert rates(OptimizerConfig(lr=1.0, warmup_samples=0), [0], total=1) == [1.0]
    [rate] = rates(OptimizerConfig(lr=1.0, warmup_samples=5, schedule="cosine"), [5], total=5)
    assert rate >= 0


def test_a_negative_learning_rate_is_refused() -> None:
    with pytest.raises(UserError, match="lr is -1"):
        OptimizerConfig(lr=-1.0)
