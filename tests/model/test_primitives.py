"""Initialisation, attention and dropout."""

from __future__ import annotations

import math

import pytest
import torch

from evodsp.model.kernels.attention import attention
from evodsp.model.primitives import Dropout, Linear, mask_bias
from evodsp.rng import Draws


@pytest.mark.parametrize(("init", "variance"), [("linear", 1 / 300), ("relu", 2 / 300), ("glorot", 2 / (300 + 200))])
def test_initial_variance(init: str, variance: float) -> None:
    """Catches a wrong fan or a truncation that is not compensated."""
    torch.manual_seed(0)
    layer = Linear(300, 200 * (3 if init == "glorot" else 1), init=init, parts=3 if init == "glorot" else 1)
    assert layer.weight.var().item() == pytest.approx(variance, rel=0.03)
    assert not layer.bias.any()


def test_gates_start_open_and_branches_at_zero() -> None:
    """Catches a residual branch that is not the identity at the start."""
    gate, final = Linear(8, 4, init="gate"), Linear(8, 4, init="final")
    assert not gate.weight.any()
    assert (gate.bias == 1).all()
    assert not final.weight.any()
    assert not final.bias.any()


def test_attention_is_softmax_of_scaled_products() -> None:
    """Catches a scale or bias applied at the wrong place, against the formula written out."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64) for n in (4, 6, 6))
    bias = torch.randn(1, 3, 4, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    out = attention(q, k, v, bias, mask_bias(mask))
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(5) + bias
    weights = torch.exp(logits) * mask[:, None, None, :]
    expected = torch.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdim=True), v)
    assert torch.allclose(out[0], expected[0], atol=1e-12)
    # A row of nothing but masked keys is uniform up to the precision of 1e9 in fp64, not NaN.
    assert torch.allclose(out[1], torch.softmax(logits[1] - 1e9, -1) @ v[1])


def test_dropout_shares_its_mask_and_keeps_the_mean() -> None:
    """Catches a mask that differs along the shared axis, a wrong scale, or samples that share a mask."""
    x = torch.ones(2, 3, 50, 40)
    dropout = Dropout(0.25, shared="seq", sharded="seq")
    streams = [Draws.root(0).at(n) for n in range(2)]
    y = dropout(x, streams, (3, 50))
    assert torch.equal(y[:, 0], y[:, 1])
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(y[0], y[1])
    assert torch.equal(y, dropout(x, streams, (3, 50)))
    assert torch.equal(dropout(x, (), (3, 50)), x)
