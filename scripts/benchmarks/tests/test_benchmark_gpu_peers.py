"""Peers and published shapes of the measurement on a GPU, tried on a CPU: what is compared, and what is not installed."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Iterable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.benchmarks import gpu_anchors, gpu_cases, gpu_peers
from scripts.benchmarks.gpu_anchors import Contender
from scripts.benchmarks.gpu_rows import Case, Measured, Setup
from scripts.parity.openfold_side import SOURCE

CPU = torch.device("cpu")


@pytest.fixture
def setup() -> Setup:
    return Setup(CPU, gpu_cases.TINY, time.monotonic() + 1000)


def numbers(measured: Iterable[Measured]) -> dict[str, float | None]:
    return {row.quantity: row.value for row in measured}


def test_every_anchor_runs_and_is_right(setup: Setup) -> None:
    """Catches an operator that is called with other numbers than its peers', or that crashes where minutes are few."""
    cases = list(gpu_anchors.cases(setup))
    first, *others = cases
    assert (first.backend, numbers(first.measure())) == ("cuequivariance", {"absent": None})
    found = {(case.name, case.backend): numbers(case.measure()) for case in others}
    for rows in found.values():
        assert set(rows) == {"error", "peak memory", "forward", "backward"}
        assert 0 < (rows["error"] or 0) < gpu_anchors.LIMIT
    names = {name.rsplit(" ", 1)[0] for name, _ in found}
    assert {"triangle attention core", "triangle multiplication"} < names
    assert len(found) == len(others)


def test_what_is_wrong_is_not_timed() -> None:
    """Catches times of an operator that computes something else, or whose gradient is wrong, standing in a table."""
    x = torch.randn(5, 7, requires_grad=True)
    wrong_gradient = Contender("b", lambda x: x.detach() * x, [x], lambda x: x * x)
    for contender in (Contender("a", lambda x: 2 * x, [x], lambda x: x), wrong_gradient):
        rows = gpu_anchors.measure(partial(copy.copy, contender), CPU, 0.0)
        assert next(rows).quantity == "error"
        with pytest.raises(ValueError, match="its error of"):
            next(rows)


def test_sdpa_on_four_axes() -> None:
    """Catches rows, or samples of a batch, that get each other's bias or keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, 5, 8, generator=generator) for _ in range(3))
    bias = torch.randn(2, 1, 4, 5, 5, generator=generator)
    for own in (bias, None):
        torch.testing.assert_close(gpu_peers.sdpa(q, k, v, own), gpu_anchors.attention(q, k, v, own))


def test_a_gpu_never_takes_the_unfused_path() -> None:
    """Catches a baseline that writes all logits to memory, which would make everything look fast beside it."""
    assert torch.nn.attention.SDPBackend.MATH not in gpu_peers.fused("cuda")


def cuequivariance() -> ModuleType:
    """A package with the two functions as their documentation has them."""

    def triangle_attention(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        assert mask is None
        assert scale is not None
        assert math.isclose(scale, 1 / math.sqrt(q.shape[-1]))
        return (q @ k.mT * scale + bias).softmax(-1) @ v

    def triangle_multiplicative_update(
        x: Tensor, direction: str = "outgoing", mask: Tensor | None = None, precision: str | None = None, **w: Tensor
    ) -> Tensor:
        dtype = x.dtype
        x, w = x.float(), {name: value.float() for name, value in w.items()}
        assert mask is not None
        x = F.layer_norm(x, x.shape[-1:], w["norm_in_weight"], w["norm_in_bias"])
        ab = F.linear(x, w["p_in_weight"], w["p_in_bias"]) * F.linear(x, w["g_in_weight"], w["g_in_bias"]).sigmoid()
        a, b = (ab * mask.unsqueeze(-1)).chunk(2, -1)
        y = torch.einsum({"outgoing": "bikd,bjkd->bijd", "incoming": "bkid,bkjd->bijd"}[direction], a, b)
        y = F.layer_norm(y, y.shape[-1:], w["norm_out_weight"], w["norm_out_bias"])
        gate = F.linear(x, w["g_out_weight"], w["g_out_bias"]).sigmoid()
        return (F.linear(y, w["p_out_weight"], w["p_out_bias"]) * gate).to(dtype)

    package = ModuleType("cuequivariance_torch")
    for function in (triangle_attention, triangle_multiplicative_update):
        setattr(package, function.__name__, function)
    return package


def test_cuequivariance_gets_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches parameters in each other's place, or a scale that is applied twice, which only a GPU would show."""
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", cuequivariance())
    assert gpu_anchors.attention_contender("cuequivariance", 6, 5, (2, 8), True, CPU).error() < gpu_anchors.LIMIT
    for backend in ("cuequivariance", "cuequivariance, bfloat16"):
        assert gpu_anchors.multiplication_contender(backend, 6, 32, CPU).error() < gpu_anchors.LIMIT


def test_without_openfold(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches peers that are not here taking the others along, or a run that says nothing about them."""
    monkeypatch.delenv(SOURCE, raising=False)
    monkeypatch.setitem(sys.modules, "openfold", None)
    cases: list[Case] = list(gpu_peers.cases(setup))
    assert (cases[0].backend, list(numbers(cases[0].measure()))) == ("OpenFold", ["absent"])
    timed = cases[1:]
    assert [case.name for case in timed] == ["evoformer 5 x 7"] * 2 + ["extra 6 x 7"] * 2
    assert {case.backend for case in timed} == {"reference"}
    assert [case.backend for case in gpu_peers.compiled_cases(setup)] == ["reference, compiled"]
    for case in timed:
        assert {"forward", "backward", "peak memory"} <= set(numbers(case.measure()))
