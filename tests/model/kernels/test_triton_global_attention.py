"""Triton's global column attention, computed by Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evodsp.model.kernels.triton import REPORTS
from tests.model.kernels import global_attention_cases as cases

Interpreter = Callable[..., Any]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("shape", "shards"), [((2, 7, 3, 5, 8), 3), ((1, 150, 2, 8, 24), 1)], ids=str)
def test_agrees_with_the_formula(interpreter: Interpreter, shape: cases.Shape, shards: int, dtype: torch.dtype) -> None:
    """Catches shards that are relative to different logits, padding heads with weight, masked columns that are not uniform."""
    interpreter(cases.agrees, shape, dtype, shards)


def test_a_shard_without_sequences(interpreter: Interpreter) -> None:
    """Catches an empty shard that is relative to -inf, which makes everything NaN."""
    interpreter(cases.agrees, (1, 2, 3, 2, 8), torch.float32, 3)


def test_offsets_beyond_32_bits(interpreter: Interpreter) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(cases.agrees, (1, 4, 2, 2, 8), torch.float16, 1, 0, True)


def test_operators_are_sound(interpreter: Interpreter) -> None:
    """Catches fake results unlike real ones."""
    interpreter(cases.operators_are_sound)


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
    draw = random.Random(number)
    sequences = draw.choice([1, 2, 5, 63, 64, 65, 127, 128, 129, 260])
    shape = (
        draw.choice([1, 2]),
        sequences,
        draw.choice([1, 2, 3]),
        draw.choice([1, 2, 8, 16, 17]),
        draw.choice([8, 16, 24, 64]),
    )
    interpreter(cases.agrees, shape, torch.float32 if number % 2 else torch.float16, draw.choice([1, 2, 3]), number)
