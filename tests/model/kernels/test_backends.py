"""Every backend of every operator against the formulas, and the formulas of attention against exponentials written out."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from evodsp.model.kernels import chunked, reference, sdpa
from evodsp.model.kernels.self_check import examples

ATTENTIONS = ["attention", "biased_attention"]


def values_and_gradients(function: Any, inputs: list[Tensor], mask: int | None) -> list[Tensor]:
    """The output, and the gradients of all inputs but the mask, for random cotangents."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
    wanted = [x.requires_grad_() for n, x in enumerate(leaves) if n != mask]
    output = function(*leaves)
    cotangent = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, wanted, cotangent)]


def agree(function: Any, formula: Any, inputs: list[Tensor], mask: int | None, atol: float = 1e-11) -> None:
    found, expected = (values_and_gradients(f, inputs, mask) for f in (function, formula))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


def some_keys(operator: str) -> list[Tensor]:
    """Inputs of attention in which every row has a key. (Logits of rows without keys, -1e9, keep few digits.)"""
    inputs = examples(operator, torch.device("cpu"), torch.float64)
    inputs[4][..., 0] = 1
    return inputs


def written_out(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keys: Tensor, pair_bias: Tensor | None = None) -> Tensor:
    """Attention with weights of exactly zero for masked keys."""
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / math.sqrt(q.shape[-1])
    weights = torch.exp(logits if pair_bias is None else logits + pair_bias[:, None]) * keys[:, :, None, None]
    o = torch.einsum("bnhqk,bnkhd->bnqhd", weights / weights.sum(-1, keepdim=True), v)
    return o / (1 + torch.exp(-gate))


@pytest.mark.parametrize("operator", ATTENTIONS)
def test_the_formula_of_attention(operator: str) -> None:
    """Catches a wrong scale, a bias for the wrong axis, a gate at the wrong place, and keys that are not masked."""
    agree(getattr(reference, operator), written_out, some_keys(operator), mask=4)


@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 9000, 1 << 20])
@pytest.mark.parametrize("operator", ATTENTIONS)
def test_chunked_attention(operator: str, chunk: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows lost between chunks, and a wrong backward pass."""
    monkeypatch.setattr(chunked, "_CPU_LOGITS", chunk)
    monkeypatch.setattr(chunked, "_KEEP", keep)
    agree(getattr(chunked, operator), getattr(reference, operator), some_keys(operator), mask=4)


def test_the_result_is_laid_out_as_the_gate() -> None:
    """Catches a copy: attention along columns returns to rows by a transposition, which must be free."""
    *inputs, _ = examples("biased_attention", torch.device("cpu"), torch.float32)
    for function in (chunked.attention, sdpa.attention):
        assert function(*inputs).transpose(1, 2).is_contiguous()


def test_a_row_of_masked_keys_is_uniform() -> None:
    """Catches NaN where all keys are masked: AF2's softmax is uniform there."""
    q, k, v, gate, keys = examples("attention", torch.device("cpu"), torch.float32)
    for function in (reference.attention, chunked.attention, sdpa.attention):
        out = function(q, k, v, gate, torch.zeros_like(keys))
        torch.testing.assert_close(out, gate.sigmoid() * v.mean(2, keepdim=True), rtol=0, atol=1e-6)


def test_sdpa() -> None:
    """Catches a transposed axis, and a mask of the wrong rows."""
    agree(sdpa.attention, reference.attention, some_keys("attention"), mask=4)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 1, 3, 4), (2, 0, 3, 6), (2, 3, 0, 6)])
@pytest.mark.parametrize("operator", ["gated_projection", "transition"])
def test_chunked_layers(operator: str, shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches operands that are interleaved, a mask along the wrong axis, positions lost between chunks, gradients of the last
    chunk only, and errors on empty shards."""
    monkeypatch.setattr(chunked, "_CPU_HIDDEN", chunk)
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64, generator=generator)

    c = shape[-1]
    if operator == "transition":
        inputs, mask = [random(*shape), random(20, c), random(20), random(c, 20), random(c)], None
    else:
        projections = [random(12, c), random(12), random(12, c), random(12)]
        inputs, mask = [random(*shape), random(*shape[:-1]), *projections], 1
    agree(getattr(chunked, operator), getattr(reference, operator), inputs, mask)
    assert getattr(chunked, operator)(*inputs).is_contiguous()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """What flash-attn's function of this name computes, for [batch, length, heads, width]. It takes widths of q, k and v that
    are equal and multiples of 8, and half precision; fp64 stands for that here."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert (dropout_p, causal, window_size, softcap, alibi_slopes) == (0.0, False, (-1, -1), 0.0, None)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, scale=softmax_scale).transpose(1, 2)


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Tensor:
    """What cuequivariance-torch's function of this name computes, for q, k and v of [batch, rows, heads, length, width]."""
    batch, rows, heads, queries, _ = q.shape
    assert bias.shape == (batch, 1, heads, queries, k.shape[3])
    assert mask is not None
    assert mask.shape == (batch, rows, 1, 1, k.shape[3])
    assert not return_aux
    logits = torch.where(mask.bool(), q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1])) + bias, -1e9)
    return logits.softmax(-1) @ v


@contextmanager
def adapter(package: str, stand_in: Callable[..., Tensor], backend: str) -> Iterator[ModuleType]:
    """The module of a backend whose package is not here: a stand-in for the one function that it calls takes its place."""
    module = ModuleType(package)
    setattr(module, stand_in.__name__, stand_in)
    name = f"evodsp.model.kernels.{backend}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package, module)
        yield importlib.import_module(name)
        del sys.modules[name]


def test_flash_attn() -> None:
    """Catches a mask that is lost in the additional channel, wrong padding, and axes in another order than the package's."""
    with adapter("flash_attn", flash_attn_func, "flash_attn") as backend:
        agree(backend.attention, reference.attention, some_keys("attention"), mask=4)


def test_cuequivariance() -> None:
    """Catches axes in another order than the package's, a bias or a mask of the wrong rows, and a gate that is lost."""
    with adapter("cuequivariance_torch", triangle_attention, "cuequivariance") as backend:
        agree(backend.biased_attention, reference.biased_attention, some_keys("biased_attention"), mask=4)
