"""Every method gives the one-device model's output and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch

from scripts.paper.config import AXES, TransformerConfig
from scripts.paper.methods import METHODS
from scripts.paper.tests.runs import Case, Result, run_method, traffic_of_formulas
from tests.ranks import RankPool

pytestmark = pytest.mark.verify

Runner = Callable[[Case], Result]
CONFIG = TransformerConfig(layers=2, width=16, heads=4, dropout=0.25)
EVEN = Case(CONFIG, (2, 4, 8, 4, 8))
"""8 time steps and 8 patches: every method takes 2 and 4 ranks."""
UNEVEN = Case(CONFIG, (2, 4, 5, 2, 14))
"""5 time steps and 7 patches."""
CUBE = Case(dataclasses.replace(CONFIG, axes=AXES[1]), (1, 4, 4, 6, 10))
"""4 time steps, 3 rows and 5 columns."""
MORE_RANKS_THAN_STEPS = Case(CONFIG, (1, 4, 3, 4, 6))


@pytest.fixture(scope="module")
def one_device(pool: RankPool) -> Runner:
    """What one device computes for a case."""

    @cache
    def result(case: Case) -> Result:
        return pool.run(1, run_method, "one_device", case)[0]

    return result


def assert_same(found: Result, expected: Result) -> None:
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found.output, expected.output, **close)
    torch.testing.assert_close(found.input_gradient, expected.input_gradient, **close)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[name], gradient, **close, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_equals_one_device(pool: RankPool, one_device: Runner, name: str, ranks: int) -> None:
    """Catches a wrong shard, head, dropout mask or scale of a gradient, and collectives that real ranks do not launch as the
    method's formulas say, or enter among those of the model's ends."""
    ends = {("forward", "all-gather", EVEN.sequence): 1, ("backward", "reduce-scatter", EVEN.sequence): 1}
    for found in pool.run(ranks, run_method, name, EVEN):
        assert_same(found, one_device(EVEN))
        assert found.layers == traffic_of_formulas(name, EVEN, ranks)
        assert found.ends == ({} if name in ("one_device", "megatron_tp") else ends)


@pytest.mark.parametrize("name", METHODS)
def test_recomputed_activations_give_the_same_gradients(pool: RankPool, one_device: Runner, name: str) -> None:
    """Catches a collective that is not launched alike, or a dropout mask that differs, when a block is computed again."""
    case = dataclasses.replace(EVEN, config=dataclasses.replace(CONFIG, checkpoint=True))
    for found in pool.run(2, run_method, name, case):
        assert_same(found, one_device(EVEN))


@pytest.mark.parametrize("name", METHODS)
def test_three_axes(pool: RankPool, one_device: Runner, name: str) -> None:
    """Catches a method that takes the tokens to have two axes."""
    for found in pool.run(2, run_method, name, CUBE):
        assert_same(found, one_device(CUBE))


@pytest.mark.parametrize(
    ("case", "ranks"), [(UNEVEN, 2), (UNEVEN, 3), (UNEVEN, 4), (CUBE, 3), (MORE_RANKS_THAN_STEPS, 4)]
)
def test_dsp_needs_no_divisible_sizes(pool: RankPool, one_device: Runner, case: Case, ranks: int) -> None:
    """Catches shards or dropout masks that are right for equal shards only, and empty shards."""
    for found in pool.run(ranks, run_method, "dsp", case):
        assert_same(found, one_device(case))
