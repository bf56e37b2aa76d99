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


def inputs(batch: int, rows: int, heads: int, length: int, width: int) -> tuple[torch.Tensor, ...]:
    """Random queries, keys, values, mask and pair bias."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, rows, heads, length, width, dtype=torch.float64) for _ in range(3))
    pair = torch.randn(batch, heads, length, length, dtype=torch.float64)
    mask = (torch.rand(batch, rows, length) > 0.3).double()
    return q, k, v, mask, pair


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Attention written out, with weights of exactly zero for masked keys."""
    logits = torch.einsum("bnhqd,bnhkd->bnhqk", q, k) / math.sqrt(q.shape[-1]) + pair[:, None]
    weights = torch.exp(logits) * mask[:, :, None, None]
    return torch.einsum("bnhqk,bnhkd->bnhqd", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_attention_is_softmax_of_scaled_products(chunk: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong scale or bias, rows lost between chunks, and a wrong backward pass."""
    monkeypatch.setattr("evodsp.model.kernels.attention._CPU_CHUNK", chunk)
    monkeypatch.setattr("evodsp.model.kernels.attention._KEEP", keep)
    q, k, v, mask, pair = inputs(2, 5, 3, 4, 6)
    mask[..., 0] = 1  # every row has a key
    leaves = [x.requires_grad_() for x in (q, k, v, pair)]
    out, expected = attention(q, k, v, mask_bias(mask), pair), formula(q, k, v, mask, pair)
    assert torch.allclose(out, expected, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(out, attention(q, k, v, mask_bias(mask), pair))
    cotangent = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, leaves, cotangent) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_row_of_masked_keys_is_uniform() -> None:
    """Catches NaN where all keys are masked: AF2's softmax is uniform there."""
    q, k, v, mask, pair = inputs(1, 2, 2, 3, 4)
    out = attention(q.float(), k.float(), v.float(), mask_bias(torch.zeros_like(mask)).float(), pair.float())
    assert torch.allclose(out, v.float().mean(-2, keepdim=True).expand_as(out), atol=1e-6)


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
