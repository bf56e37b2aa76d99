"""Initialisation."""

from __future__ import annotations

import pytest
import torch

from evodsp.model.primitives import Linear


@pytest.mark.parametrize(("init", "variance"), [("linear", 1 / 300), ("relu", 2 / 300), ("glorot", 2 / (300 + 200))])
def test_initial_variance(init: str, variance: float) -> None:
    """Catches a wrong fan, and a truncation that is not compensated."""
    torch.manual_seed(0)
    layer = Linear(300, 200 * (3 if init == "glorot" else 1), init=init, parts=3 if init == "glorot" else 1)
    assert layer.weight.var().item() == pytest.approx(variance, rel=0.03)
    assert not layer.bias.any()


def test_gates_start_open_and_branches_at_zero() -> None:
    """Catches a residual branch that is not the identity at the start, and a gate that starts closed."""
    gate, final = Linear(8, 4, init="gate"), Linear(8, 4, init="final")
    assert not gate.weight.any()
    assert (gate.bias == 1).all()
    assert not final.weight.any()
    assert not final.bias.any()
