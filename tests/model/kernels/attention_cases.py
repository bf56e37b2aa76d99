"""What tests of Triton's attention do inside the interpreting process. Shapes are (B, N, Q, K, H, D)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels import attention as kernels
from evodsp.model.kernels.triton_kernels.attention import attention
from tests.model.kernels.interpreter import check, far_apart, random

Shape = tuple[int, int, int, int, int, int]
MASKED = 1e9


def formula(projected: Tensor, pair_bias: Tensor | None, keys: Tensor, first: int) -> Tensor:
    """The supplement's formula, line by line."""
    q, k, v, gate = projected.unbind(3)
    if pair_bias is not None:
        q, gate = (x[:, :, first : first + pair_bias.shape[2]] for x in (q, gate))
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / q.shape[-1] ** 0.5
    if pair_bias is not None:
        logits = logits + pair_bias.unsqueeze(1)
    logits = logits + ((keys.double() - 1) * MASKED)[:, :, None, None]
    # In fp32, as everywhere in AF2, -1e9 swallows the logits. In fp64 it would not.
    absent = (keys == 0).all(-1)[:, :, None, None, None]
    logits = torch.where(absent, logits - logits.detach().clamp(min=-2 * MASKED), logits)  # -inf stays
    return torch.einsum("bnhqk,bnkhd->bnqhd", logits.softmax(-1), v) * gate.sigmoid()


def inputs(
    shape: Shape, dtype: torch.dtype, biased: bool, seed: int
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Tensors with gradients; the key mask, with 70 % of keys present and none in the very first row, and the first query.

    The last Q of the K positions attend.
    """
    b, n, q, k, h, d = shape
    draw = random(seed, dtype)
    tensors: dict[str, Tensor | None] = {"projected": draw(b, n, k, 4, h, d)}
    tensors["pair_bias"] = draw(b, h, q, k) if biased else None
    keys = (torch.rand(b, n, k, generator=torch.Generator().manual_seed(seed)) < 0.7).to(dtype)
    keys[:1, :1] = 0
    return tensors, {"keys": keys, "first": k - q}


def agrees(shape: Shape, dtype: torch.dtype, biased: bool, seed: int = 0) -> None:
    check(attention, formula, *inputs(shape, dtype, biased, seed))


def agrees_with_runs(dtype: torch.dtype, length: int, width: int) -> None:
    """Rows of keys that are all present, lack the last one, those from 32 on, one in the middle, the first one, or all; and a
    kernel of the bias's gradient of few programs, each with several rows."""
    tensors, fixed = inputs((2, 12, 40, length, 1, width), dtype, True, 8)
    keys = torch.ones_like(fixed["keys"])
    absences = [*[slice(0)] * 3, slice(-1, None), slice(32, None), slice(40, 41), slice(1), slice(None)]
    for row, absent in enumerate(absences):
        keys[0, row, absent] = 0
        keys[1, 11 - row, absent] = 0
    with patch.object(kernels, "_ENOUGH_PROGRAMS", 8):
        check(attention, formula, tensors, fixed | {"keys": keys})


def agrees_with_large_logits(dtype: torch.dtype, width: int, biased: bool) -> None:
    """Logits of a hundred and more, whose exponentials exceed fp32, and biases of -inf. Rows of keys: none present (with small
    logits, because -1e9 leaves large ones few digits), the first tiles absent, holes in the first tile and in the last, all
    present, one present, the last tile absent.

    Of a row the backward pass keeps one number, the log of its sum: p = 2^(logit - log). Rounding `log`, as large as the
    largest logit, makes a relative error in p of that logit's spacing in fp32, which is allowed.
    """
    queries = 67 if biased else 131
    tensors, fixed = inputs((1, 7, queries, 131, 1, width), dtype, biased, 9)
    keys = torch.ones_like(fixed["keys"])
    absences = [slice(0, None), slice(0, 64), slice(3, 9), slice(129, 130), slice(0), slice(1, None), slice(96, None)]
    for row, absent in enumerate(absences):
        keys[0, row, absent] = 0
    projected, bias = tensors["projected"], tensors["pair_bias"]
    projected[:, 1:, :, 0] *= 30
    if bias is not None:
        bias *= 7
        bias[..., 0:131:13] = float("-inf")
        bias[..., 0] = 0  # the only key of a row
    q, k = projected[:, 1:, -queries:, 0], projected[:, 1:, :, 1]
    largest = torch.einsum("bnqhd,bnkhd->bnhqk", q, k).abs().max() / width**0.5
    spacing = float(largest / math.log(2)) * torch.finfo(torch.float32).eps
    check(attention, formula, tensors, fixed | {"keys": keys}, least=spacing)


def agrees_strided(dtype: torch.dtype) -> None:
    """The projection of the transposed MSA, the bias with heads fastest, keys out of a larger mask."""
    b, n, length, h, d = 2, 3, 17, 2, 8
    tensors, fixed = inputs((b, n, length, length, h, d), dtype, True, 1)
    mask = torch.zeros(b, length, n + 1, dtype=torch.bool)
    mask[:, :, 1:] = fixed["keys"].transpose(1, 2) > 0

    def layout(name: str, x: Tensor) -> Tensor:
        if name == "pair_bias":
            return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    result = check(attention, formula, tensors, {"keys": mask[:, :, 1:].transpose(1, 2), "first": 0}, layout)
    assert result.transpose(1, 2).is_contiguous(), "the result should be laid out as the projection is"


def agrees_far_apart(axis: int) -> None:
    """The last element of the projection and the upstream gradient lies beyond 2^31 elements; strides alone are below 2^31."""
    shape = [1, 4, 2, 2, 8] if axis == 1 else [1, 1, 4, 2, 8]
    b, n, length, h, d = shape
    tensors, fixed = inputs((b, n, length, length, h, d), torch.float16, True, 2)

    def layout(name: str, x: Tensor) -> Tensor:
        return x if name == "pair_bias" else far_apart(x, axis, (1 << 30) - 16)

    check(attention, formula, tensors, fixed, layout)


def error_with_offset() -> tuple[float, float]:
    """Relative errors of grad_q in fp16, with values around 0 and around 10: a common offset changes no exact gradient of q."""
    errors = []
    for offset in (0.0, 10.0):
        tensors, fixed = inputs((1, 2, 40, 40, 2, 32), torch.float16, True, 3)
        tensors["projected"][:, :, :, 2] += offset
        tensors |= {n: x.requires_grad_() for n, x in tensors.items()}
        exact = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
        upstream = random(4, torch.float16)(1, 2, 40, 2, 32)
        (got,) = torch.autograd.grad(attention(**tensors, **fixed), tensors["projected"], upstream)
        (wanted,) = torch.autograd.grad(formula(**exact, **fixed), exact["projected"], upstream.double())
        got, wanted = got[:, :, :, 0], wanted[:, :, :, 0]
        errors.append(float((got - wanted).norm() / wanted.norm()))
    return errors[0], errors[1]


def compiles() -> None:
    """One graph under torch.compile, with the numbers of the operator itself."""
    tensors, fixed = inputs((1, 2, 5, 7, 2, 8), torch.float32, True, 5)

    def step(projected: Tensor, pair_bias: Tensor, keys: Tensor, first: int) -> Tensor:
        return attention(projected * 2, keys, pair_bias, first).square().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        total = function(**given, **fixed)
        results.append([total, *torch.autograd.grad(total, list(given.values()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def operators_are_sound() -> None:
    """torch's own checks: nothing is modified or aliased, and fake results have the shapes, strides and dtypes of real ones."""
    tensors, fixed = inputs((1, 2, 5, 7, 2, 8), torch.float32, True, 6)
    projected = tensors["projected"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(
        torch.ops.evodsp.attention.default,
        (projected, fixed["keys"], tensors["pair_bias"].requires_grad_(), fixed["first"]),
        test_utils=("test_schema", "test_faketensor"),
    )


def kept_for_backward() -> dict[str, int]:
    """Bytes that autograd keeps, by what they are."""
    tensors, fixed = inputs((1, 2, 16, 16, 2, 8), torch.float16, True, 7)
    named = {x.untyped_storage().data_ptr(): n for n, x in {**tensors, "keys": fixed["keys"]}.items()}
    kept: Counter[str] = Counter()

    def pack(x: Tensor) -> Tensor:
        kept[named.get(x.untyped_storage().data_ptr(), "result")] += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(**{n: x.requires_grad_() for n, x in tensors.items()}, **fixed)
    return dict(kept)
