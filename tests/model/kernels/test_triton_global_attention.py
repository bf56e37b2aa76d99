"""Triton's global column attention, computed by Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.model.kernels.triton import REPORTS, global_attention
from evodsp.parallel.exchange import added_softmax_sums
from tests.model.kernels.interpreter import check, far_apart, random

Shape = tuple[int, int, int, int, int]


def in_shards(q: Tensor, key_value: Tensor, keys: Tensor, shards: int) -> Tensor:
    """The average of v over all sequences, from the sums of each shard, put together as ranks do it."""
    parts = zip(*(x.tensor_split(shards, 1) for x in (key_value, keys)), strict=True)
    sums = added_softmax_sums(torch.stack([global_attention(q, *part) for part in parts]))
    return (sums[..., :-1] / sums[..., -1:]).to(q.dtype)


def formula(q: Tensor, key_value: Tensor, keys: Tensor, shards: int) -> Tensor:
    """The softmax average over all sequences."""
    k, v = key_value.unbind(3)
    logits = torch.einsum("brhd,bsrd->brhs", q, k) / q.shape[-1] ** 0.5
    absent = (keys == 0).all(1)[:, :, None, None]  # as in fp32, -1e9 swallows these logits
    logits = torch.where(
        absent, logits - logits.detach(), logits + ((keys.double() - 1) * 1e9).transpose(1, 2).unsqueeze(2)
    )
    return torch.einsum("brhs,bsrd->brhd", logits.softmax(-1), v)


def agrees(shape: Shape, dtype: torch.dtype, shards: int, seed: int = 0, apart: bool = False) -> None:
    """`apart`: with 2^30 elements between sequences."""
    b, s, r, h, d = shape
    draw = random(seed, dtype)
    tensors = {"q": draw(b, r, h, d), "key_value": draw(b, s, r, 2, d)}
    keys = (torch.rand(b, s, r, generator=torch.Generator().manual_seed(seed)) < 0.7).to(dtype)
    keys[:, :, :1] = 0

    def layout(name: str, x: Tensor) -> Tensor:
        return far_apart(x, 1, (1 << 30) - 16) if apart and name == "key_value" else x

    check(in_shards, formula, tensors, {"keys": keys, "shards": shards}, layout)


def operators_are_sound() -> None:
    draw = random(1, torch.float32)
    inputs = [draw(2, 3, 4, 8), draw(2, 5, 3, 2, 8)]
    torch.library.opcheck(
        torch.ops.evodsp.global_attention.default,
        (*(x.requires_grad_() for x in inputs), torch.ones(2, 5, 3)),
        test_utils=("test_schema", "test_faketensor"),
    )


Interpreter = Callable[..., Any]


@pytest.mark.parametrize(
    ("shape", "shards", "dtype", "apart"),
    [
        ((2, 7, 3, 5, 8), 3, torch.float32, False),
        ((2, 7, 3, 5, 8), 3, torch.float16, False),
        ((1, 150, 2, 8, 24), 1, torch.float32, False),
        ((1, 2, 3, 2, 8), 3, torch.float32, False),
        ((1, 4, 2, 2, 8), 1, torch.float16, True),
    ],
    ids=str,
)
def test_agrees_with_the_formula(
    interpreter: Interpreter, shape: Shape, shards: int, dtype: torch.dtype, apart: bool
) -> None:
    """Catches shards that are relative to different logits, padding heads with weight, masked columns that are not uniform, an
    empty shard that is relative to -inf, which makes everything NaN, and offsets that wrap at 2^31 elements (a crash, or
    another row's numbers)."""
    interpreter(agrees, shape, dtype, shards, 0, apart)


def test_operators_are_sound(interpreter: Interpreter) -> None:
    """Catches fake results unlike real ones."""
    interpreter(operators_are_sound)


def test_report_of_launches_and_bytes() -> None:
    """Catches launches that are not reported, and tensors that are moved but not counted. Needs no Triton."""
    s, r, h, d = 5120, 384, 8, 8
    q, mask = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1, r, h, d), (1, s, r)))
    key_value = torch.empty(1, s, r, 2, d, dtype=torch.bfloat16, device="meta")
    sums = torch.empty(1, r, h, d + 2, device="meta")
    read = 2 * (r * h * d + 2 * s * r * d + s * r)
    assert REPORTS["evodsp::global_attention"]((q, key_value, mask)) == (1, read + 4 * r * h * (d + 2))
    assert REPORTS["evodsp::global_attention_backward"]((sums, q, key_value, mask, sums)) == (
        1,
        read + 2 * 4 * r * h * (d + 2) + 2 * (r * h * d + 2 * s * r * d),
    )


@pytest.mark.verify
@pytest.mark.parametrize("number", range(40))
def test_agrees_at_many_shapes(interpreter: Interpreter, number: int) -> None:
    """Catches sizes at which tiles are cut wrong."""
    draw = Random(number)
    sequences = draw.choice([1, 2, 5, 63, 64, 65, 127, 128, 129, 260])
    shape = (
        draw.choice([1, 2]),
        sequences,
        draw.choice([1, 2, 3]),
        draw.choice([1, 2, 8, 16, 17]),
        draw.choice([8, 16, 24, 64]),
    )
    interpreter(agrees, shape, torch.float32 if number % 2 else torch.float16, draw.choice([1, 2, 3]), number)
