"""Every backend of every operator against the formulas, and the formulas of attention against exponentials written out."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from evodsp.model.kernels import by_chunks, chunked, products, reference, sdpa
from evodsp.model.kernels.operators import OPERATORS

ATTENTIONS = ["attention", "biased_attention"]


def values_and_gradients(operator: str, function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of all inputs but the mask, for random cotangents."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
    wanted = [leaves[n].requires_grad_() for n in OPERATORS[operator].differentiable(leaves)]
    outputs = OPERATORS[operator].call(function, leaves)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, wanted, cotangents)]


def agree(operator: str, function: Any, formula: Any, inputs: list[Tensor], atol: float = 1e-11) -> None:
    found, expected = (values_and_gradients(operator, f, inputs) for f in (function, formula))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


def some_keys(operator: str) -> list[Tensor]:
    """Inputs of attention in which every row has a key. (Logits of rows without keys, -1e9, keep few digits.)"""
    inputs = OPERATORS[operator].inputs(torch.device("cpu"), torch.float64)
    inputs[1][..., 0] = 1
    return inputs


def written_out(projected: Tensor, keys: Tensor, pair_bias: Tensor | None = None, first: int = 0) -> Tensor:
    """Attention with weights of exactly zero for masked keys."""
    q, k, v, gate = projected.unbind(3)
    last = q.shape[2] if pair_bias is None else first + pair_bias.shape[2]
    q, gate = q[:, :, first:last], gate[:, :, first:last]
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / math.sqrt(q.shape[-1])
    weights = torch.exp(logits if pair_bias is None else logits + pair_bias[:, None]) * keys[:, :, None, None]
    o = torch.einsum("bnhqk,bnkhd->bnqhd", weights / weights.sum(-1, keepdim=True), v)
    return o / (1 + torch.exp(-gate))


@pytest.mark.parametrize("operator", ATTENTIONS)
def test_the_formula_of_attention(operator: str) -> None:
    """Catches a wrong scale, a bias for the wrong axis, a gate or queries of other positions, and keys that are not masked."""
    agree(operator, getattr(reference, operator), written_out, some_keys(operator))


@pytest.mark.parametrize("chunk", [1, 9000, 1 << 20])
@pytest.mark.parametrize("operator", ATTENTIONS)
def test_chunked_attention(operator: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows or queries lost between chunks, and a wrong backward pass."""
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", chunk)
    agree(operator, getattr(chunked, operator), getattr(reference, operator), some_keys(operator))


@pytest.mark.parametrize("biased", [False, True])
def test_weights_of_half_precision_factors(biased: bool) -> None:
    """A GPU's way, which no product of a CPU takes: logits in float32 of factors in half precision. Catches logits that are not
    scaled, a scale that the bias gets too, and queries that are rounded once more."""
    generator = torch.Generator().manual_seed(0)
    q, k = (2 * torch.randn(2, 3, 4, 24, generator=generator) for _ in range(2))
    bias, masked = torch.randn(3, 4, 4, generator=generator), torch.zeros(2, 1, 1, 4)
    masked[1, ..., 2] = -1e9
    q, k = q.bfloat16(), k.bfloat16()
    logits = q.double() @ k.double().mT / 24**0.5 + masked + (bias.double() if biased else 0)
    found = chunked._weights(q, k, masked, bias if biased else None)
    torch.testing.assert_close(found.double(), logits.softmax(-1), rtol=1e-5, atol=1e-7)


def test_the_result_is_laid_out_as_the_projection() -> None:
    """Catches a copy: attention along columns returns to rows by a transposition, which must be free."""
    inputs = OPERATORS["attention"].inputs(torch.device("cpu"), torch.float32)
    for function in (chunked.attention, sdpa.attention):
        assert function(*inputs).transpose(1, 2).is_contiguous()


def test_a_row_of_masked_keys_is_uniform() -> None:
    """Catches NaN where all keys are masked: AF2's softmax is uniform there."""
    projected, keys = OPERATORS["attention"].inputs(torch.device("cpu"), torch.float32)
    _, _, v, gate = projected.unbind(3)
    for function in (reference.attention, chunked.attention, sdpa.attention):
        out = function(projected, torch.zeros_like(keys))
        torch.testing.assert_close(out, gate.sigmoid() * v.mean(2, keepdim=True), rtol=0, atol=1e-6)


def test_sdpa() -> None:
    """Catches a transposed axis, and a mask of the wrong rows."""
    agree("attention", sdpa.attention, reference.attention, some_keys("attention"))


def some_sequences(sequences: int) -> list[Tensor]:
    """Inputs of global attention in which every column has a sequence."""
    q, key_value, keys = OPERATORS["global_attention"].inputs(torch.device("cpu"), torch.float64)
    keys[:, -1] = 1
    return [q, key_value[:, -sequences:], keys[:, -sequences:]]


def global_written_out(q: Tensor, key_value: Tensor, keys: Tensor) -> Tensor:
    """Sums of exponentials that are relative to nothing, with weights of exactly zero for masked sequences."""
    k, v = key_value.unbind(3)
    weights = torch.exp(torch.einsum("brhd,bsrd->brhs", q, k) / math.sqrt(q.shape[-1])) * keys.mT.unsqueeze(2)
    numerator = torch.einsum("brhs,bsrd->brhd", weights, v)
    return torch.cat([numerator, weights.sum(-1, keepdim=True), torch.zeros_like(weights[..., :1])], -1)


def test_the_formula_of_global_attention() -> None:
    """Catches a wrong scale, a shift in another base than the sums, and sequences that are not masked."""
    agree("global_attention", reference.global_attention, global_written_out, some_sequences(37))


@pytest.mark.parametrize("chunk", [1, 400, 1 << 20])
@pytest.mark.parametrize("sequences", [37, 2], ids=["37", "none in one shard"])
def test_chunked_global_attention(sequences: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches columns lost between chunks, a wrong backward pass, a gradient of the shift, and errors on empty shards."""
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", chunk)
    inputs = some_sequences(sequences)
    agree("global_attention", chunked.global_attention, reference.global_attention, inputs)


LAYERS = [
    *("gated_linear", "gated_output", "gated_projection", "pooled_projections", "projections", "transition"),
    "triangle_multiplication",
]


@pytest.mark.verify
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("sizes", [(2, 5), (1, 3), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("operator", LAYERS)
def test_layers(operator: str, sizes: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches operands that are interleaved, a mask along the wrong axis, positions lost between chunks, gradients of the last
    chunk only, the backward pass of another product of edges, and errors on empty shards."""
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", chunk)
    batch, rows = sizes
    square = operator in ("gated_projection", "triangle_multiplication")  # these two have a pair mask

    def cut(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x[:batch]  # keys
        if x.ndim > 2:
            x = x[:batch] if x.shape[1] == 1 else x[:batch, :rows]  # one for all rows
        return x[:, :, :rows] if square and x.ndim > 2 else x

    inputs = [cut(x) for x in OPERATORS[operator].inputs(torch.device("cpu"), torch.float64)]
    agree(operator, getattr(chunked, operator), getattr(reference, operator), inputs)


def test_the_linear_layer() -> None:
    """Catches a wrong backward pass of the linear layer that is an operator because of its bias's gradient."""
    inputs = OPERATORS["linear"].inputs(torch.device("cpu"), torch.float64)
    agree("linear", by_chunks.Layers(chunked._STEPS).linear, reference.linear, inputs)


def test_the_incoming_product() -> None:
    """Catches the gradients of outgoing edges for incoming ones."""
    inputs = OPERATORS["triangle_multiplication"].inputs(torch.device("cpu"), torch.float64)
    functions = [partial(f.triangle_multiplication, outgoing=False) for f in (chunked, reference)]  # type: ignore[attr-defined]
    own, formula = ((lambda *x, outgoing, f=f, **more: f(*x, **more)) for f in functions)
    agree("triangle_multiplication", own, formula, inputs)


@pytest.mark.parametrize("operator", LAYERS)
def test_no_layer_keeps_an_intermediate(operator: str) -> None:
    """Catches a norm, operands or a hidden layer that are kept for the backward pass: beside inputs, a few parameters only, of
    triangle multiplication the product, the gate and joined weights, and of its output the gate."""
    inputs = OPERATORS[operator].inputs(torch.device("cpu"), torch.float64)
    for n in OPERATORS[operator].differentiable(inputs):
        inputs[n].requires_grad_()
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        OPERATORS[operator].call(getattr(chunked, operator), inputs)
    large = [x for x in kept if x.untyped_storage().data_ptr() not in own and x[..., 0].numel() >= 2 * 5 * 7]
    assert len(large) == {"triangle_multiplication": 3, "gated_output": 1}.get(operator, 0)


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


def triangle_multiplicative_update(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """What cuequivariance-torch's function of this name (0.13.0) computes: its signature and the sums of its reference."""
    assert precision is None
    assert mask is not None
    assert None not in (p_in_weight, g_in_weight, p_out_weight, g_out_weight)
    y = F.layer_norm(x, x.shape[-1:], norm_in_weight, norm_in_bias, eps)
    gated = F.linear(y, g_in_weight, g_in_bias).sigmoid() * F.linear(y, p_in_weight, p_in_bias)  # type: ignore[arg-type]
    a, b = (gated * mask.unsqueeze(-1)).chunk(2, -1)
    product = torch.einsum({"outgoing": "bikc,bjkc->bijc", "incoming": "bkic,bkjc->bijc"}[direction], a, b)
    product = F.layer_norm(product, product.shape[-1:], norm_out_weight, norm_out_bias, eps)
    return F.linear(product, p_out_weight, p_out_bias) * F.linear(y, g_out_weight, g_out_bias).sigmoid()  # type: ignore[arg-type]


@contextmanager
def adapter(package: str, backend: str, *stand_ins: Callable[..., Tensor]) -> Iterator[ModuleType]:
    """The module of a backend whose package is not here: stand-ins for the functions that it calls take their places."""
    module = ModuleType(package)
    for stand_in in stand_ins:
        setattr(module, stand_in.__name__, stand_in)
    name = f"evodsp.model.kernels.{backend}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package, module)
        yield importlib.import_module(name)
        del sys.modules[name]


def test_flash_attn() -> None:
    """Catches a mask that is lost in the additional channel, wrong padding, and axes in another order than the package's."""
    with adapter("flash_attn", "flash_attn", flash_attn_func) as backend:
        agree("attention", backend.attention, reference.attention, some_keys("attention"))


def test_cuequivariance() -> None:
    """Catches axes in another order than the package's, a bias or a mask of the wrong rows, a gate that is lost, parameters in
    each other's place, operands of incoming edges in the package's order, a residual that is lost, and other dropout."""
    stand_ins = triangle_attention, triangle_multiplicative_update
    with adapter("cuequivariance_torch", "cuequivariance", *stand_ins) as backend:
        agree("biased_attention", backend.biased_attention, reference.biased_attention, some_keys("biased_attention"))
        own, formula = backend.triangle_multiplication, reference.triangle_multiplication
        inputs = OPERATORS["triangle_multiplication"].inputs(torch.device("cpu"), torch.float64)
        agree("triangle_multiplication", own, formula, inputs)
        incoming = ((lambda *x, outgoing, f=f, **more: f(*x, outgoing=False, **more)) for f in (own, formula))
        agree("triangle_multiplication", *incoming, inputs)
        *plain, _ = inputs
        torch.testing.assert_close(own(*plain, outgoing=True), formula(*plain, outgoing=True))


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("residues", [(5, 7), (7, 5), (1, 4), (0, 3), (3, 0)])
def test_equals_the_formula_in_values_and_gradients(
    residues: tuple[int, int], mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches wrong rows in a chunk, transposed channels, gradients of the last chunk only, and errors on empty shards."""
    i, j = residues
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", 2 * max(1, j) * 9)  # two rows at a time
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [x.requires_grad_() for x in (random(2, 4, i, 3), random(2, 4, j, 3), random(6, 9))]
    counts = []
    if mean:
        inputs.append(random(6).requires_grad_())
        counts.append(random(2, i, j, 1).abs() + 1)
    expected = reference.outer_product(*inputs, *counts)
    upstream = random(*expected.shape)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    found = chunked.outer_product(*inputs, *counts)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for own, theirs in zip(torch.autograd.grad(found, inputs, upstream), gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_a_recomputation_that_ends_with_it_forms_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an operator that computes before it saves what its backward pass needs: each recomputed block would form the
    result of its outer product mean, a sixth of its arithmetic, for nothing."""
    results: list[None] = []
    form = products._result
    monkeypatch.setattr(products, "_result", lambda *xs: (results.append(None), form(*xs))[1])
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((1, 4, 5, 3), (1, 4, 7, 3), (6, 9), (6,))]
    counts = torch.full((1, 5, 7, 1), 4.0)

    def segment(*xs: torch.Tensor) -> torch.Tensor:
        left, *others = xs
        return torch.ones(()) + chunked.outer_product(left.tanh(), *others, counts)

    expected = torch.autograd.grad(segment(*inputs).square().sum(), inputs)
    results.clear()
    out = checkpoint(segment, *inputs, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert len(results) == 1
    torch.testing.assert_close(found, expected)
