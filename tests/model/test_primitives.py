"""Initialisation and dropout."""

from __future__ import annotations

import pytest
import torch

from evodsp.model.primitives import Dropout, Linear
from evodsp.rng import Draws


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


def test_dropout_shares_its_mask_and_keeps_the_mean() -> None:
    """Catches a mask that differs along the shared axis, a wrong scale, or samples that share a mask."""
    x = torch.ones(2, 3, 50, 40)
    dropout = Dropout(0.25, "row_attention", shared_axis="seq")
    streams = [Draws.root(0).at(n) for n in range(2)]
    y = dropout(x, streams, (3, 50), "seq")
    assert torch.equal(y[:, 0], y[:, 1])
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(y[0], y[1])
    assert torch.equal(y, dropout(x, streams, (3, 50), "seq"))
    assert torch.equal(dropout(x, (), (3, 50), "seq"), x)
