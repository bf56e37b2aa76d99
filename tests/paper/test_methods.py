"""Every method gives the one-device model's output and gradients."""

from __future__ import annotations

import pytest
import torch

from scripts.paper.transformer import TransformerConfig
from tests.paper.runs import Case, Result, run_method
from tests.ranks import RankPool

SMALL = Case(TransformerConfig(layers=2, width=16, heads=4, dropout=0.25), (2, 4, 8, 4, 6))


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> Result:
    """What one device computes."""
    [result] = pool.run(1, run_method, "one_device", SMALL)
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
@pytest.mark.parametrize("name", ["one_device", "ulysses", "megatron_sp", "megatron_tp", "ring"])
def test_a_method_equals_one_device(pool: RankPool, expected: Result, name: str, ranks: int) -> None:
    """Catches a wrong shard, head, mask of dropout or scale of a gradient."""
    for found in pool.run(ranks, run_method, name, SMALL):
        assert_same(found, expected)
