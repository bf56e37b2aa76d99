"""Triton's attention, computed by Triton's interpreter, against the formula in fp64: results and all gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evodsp.model.kernels.triton import REPORTS, attention
from evodsp.model.kernels.triton_kernels.attention import OPERATORS
from tests.model.kernels import attention_cases as cases


def _shapes(count: int) -> list[cases.Shape]:
    draw = random.Random(0)
    widths = [8, 16, 24, 32, 48, 64]
    shapes = []
    for _ in range(count):
        many_rows = draw.random() < 0.3
        sizes = [1, 2, 3, 5] if many_rows else [1, 15, 16, 17, 31, 33, 63, 64, 65, 70, 97]
        batch, rows = draw.choice([1, 2]), draw.choice([16, 17, 20] if many_rows else [1, 2, 3])
        shapes.append((batch, rows, *sorted(draw.choices(sizes, k=2)), draw.choice([1, 2]), draw.choice(widths)))
    return shapes


SHAPES = [(2, 2, 5, 7, 2, 8), (1, 3, 65, 67, 1, 24), (1, 17, 2, 3, 1, 64), (1, 1, 5, 253, 1, 8)]


@pytest.mark.verify_but("(2, 2, 5, 7, 2, 8)-torch.float16", "(1, 17, 2, 3, 1, 64)-torch.float16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_formula(interpreter: Callable[..., Any], shape: cases.Shape, dtype: torch.dtype) -> None:
    """Catches wrong arithmetic, tails of tiles that leak in, all keys masked not being uniform, samples or rows mixed up,
    gradients of k and v in each other's place, and gradients that are left uninitialised where a position does not attend."""
    interpreter(cases.agrees, shape, dtype, True)


@pytest.mark.verify
@pytest.mark.parametrize("number", range(37))
def test_agrees_at_many_shapes(interpreter: Callable[..., Any], number: int) -> None:
    """Catches sizes at which tiles, groups of rows or parts of the bias's gradient are cut wrong."""
    dtype = torch.float32 if number % 2 else torch.float16
    batch, rows, queries, *others = _shapes(37)[number]
    biased = number % 5 != 0  # without a bias every position attends
    shape = (batch, rows, queries if biased else others[0], *others)
    interpreter(cases.agrees, shape, dtype, biased, number)


@pytest.mark.verify_but("dtype1-64-8")
@pytest.mark.parametrize(
    ("dtype", "length", "width"), [(torch.float16, 67, 32), (torch.float16, 64, 8), (torch.float32, 67, 8)]
)
def test_keys_that_are_present_in_a_row(
    interpreter: Callable[..., Any], dtype: torch.dtype, length: int, width: int
) -> None:
    """Catches an absent key in a loop without masks, a last tile with keys that do not exist taken as whole, a scale that the
    two loops of a kernel apply differently, and rows of the bias's gradient that are left out or summed twice."""
    interpreter(cases.agrees_with_runs, dtype, length, width)


@pytest.mark.verify
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_logits(interpreter: Callable[..., Any], dtype: torch.dtype, width: int, biased: bool) -> None:
    """Catches exponentials that overflow in either loop, a maximum that does not pass from one loop to the other, and tiles and
    rows without a key that are not numbers."""
    interpreter(cases.agrees_with_large_logits, dtype, width, biased)


def test_agrees_without_a_bias(interpreter: Callable[..., Any]) -> None:
    """Catches column attention reading or differentiating a bias that is not there."""
    interpreter(cases.agrees, (1, 2, 33, 33, 2, 16), torch.float32, False)


@pytest.mark.parametrize("shape", [(1, 0, 3, 3, 2, 8), (2, 3, 0, 0, 2, 8), (1, 2, 0, 5, 1, 8)], ids=str)
def test_empty_shards(interpreter: Callable[..., Any], shape: cases.Shape) -> None:
    """Catches empty grids that are launched, and gradients that are left uninitialised where there is nothing to sum."""
    interpreter(cases.agrees, shape, torch.float32, True)


@pytest.mark.verify
def test_strided_views(interpreter: Callable[..., Any]) -> None:
    """Catches strides that are assumed: a transposed projection, and masks of booleans."""
    interpreter(cases.agrees_strided, torch.float32)


@pytest.mark.parametrize("axis", [1, 2], ids=["rows", "positions"])
def test_offsets_beyond_32_bits(interpreter: Callable[..., Any], axis: int) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(cases.agrees_far_apart, axis)


def test_offset_of_values_does_not_hurt_the_gradient(interpreter: Callable[..., Any]) -> None:
    """Catches a centre of the softmax's backward that is computed from the rounded output."""
    without, with_offset = interpreter(cases.error_with_offset)
    assert without < 1e-3
    assert with_offset < 1.5e-3


@pytest.mark.verify
def test_compiles_as_one_graph(interpreter: Callable[..., Any]) -> None:
    """Catches graph breaks, and fake results that differ from real ones in shape or layout."""
    interpreter(cases.compiles)
    interpreter(cases.operators_are_sound)


def test_what_backward_keeps(interpreter: Callable[..., Any]) -> None:
    """Catches logits, weights or copies of inputs that are kept: beside inputs only the output and 8 bytes a query."""
    kept = interpreter(cases.kept_for_backward)
    one = 2 * 16 * 2 * 8 * 2  # bytes of q: N L H D in fp16
    queries = 2 * 16 * 2
    assert kept == {
        "projected": 4 * one,
        "keys": 2 * 16 * 2,
        "pair_bias": 2 * 16 * 16 * 2,
        "result": one + 2 * 4 * queries,
    }


def test_report_of_launches_and_bytes() -> None:
    """Catches launches that are not reported, and tensors that are moved but not counted. Needs no Triton."""
    n, length, h, d = 128, 256, 8, 32
    projected = torch.empty(1, n, length, 4, h, d, dtype=torch.bfloat16, device="meta")
    out = torch.empty(1, n, length, h, d, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, n, length, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, h, length, length, dtype=torch.bfloat16, device="meta")
    queries = torch.empty(1, n, h, length, device="meta")
    unit, mask, pairs, per_query = 2 * n * length * h * d, 2 * n * length, 2 * h * length**2, 4 * n * h * length
    assert REPORTS["evodsp::attention"]((projected, keys, bias, 0)) == (1, 5 * unit + mask + pairs + 2 * per_query)
    launches, moved = REPORTS["evodsp::attention_backward"](
        (out, projected, keys, bias, 0, out, queries, queries, True)
    )
    parts = 5  # of the bias's gradient, in fp32
    kernels = (9 * unit, 6 * unit, 4 * unit)
    assert launches == 5  # the first one copies the bias with its queries fastest
    assert moved == sum(kernels) + 3 * (mask + pairs) + (3 + 2 + 2) * per_query + 2 * (2 * pairs * parts) + 3 * pairs


@pytest.mark.parametrize(("width", "first", "eights"), [(8, 0, True), (12, 0, False), (8, 4, False)])
def test_kernels_are_told_the_truth_of_strides(width: int, first: int, eights: bool) -> None:
    """Catches a promise of aligned strides that does not hold, on which a GPU would trap and which the interpreter ignores.
    Needs no Triton."""
    memory = torch.empty(1, 3, 5, 4, 2, width + first, dtype=torch.bfloat16, device="meta")
    inputs = memory[..., first:], memory[..., 0, 0, 0], None, 0
    out = torch.empty(1, 3, 5, 2, width, dtype=torch.bfloat16, device="meta")
    statistics = torch.empty(1, 3, 2, 5, device="meta")
    forward, backward = OPERATORS
    launches = forward.launches(*inputs) + backward.launches(out, *inputs, out, statistics, statistics, False)
    assert [launch.constants["EIGHTS"] for launch in launches] == [eights] * 3


@pytest.mark.parametrize("length", [16, 17])
def test_rows_of_the_bias_are_whole(length: int) -> None:
    """Catches rows of the bias that end within 16 elements, which kernels read to their end, and copies without need. Needs
    no Triton."""
    projected = torch.empty(1, 3, length, 4, 2, 8, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 2, length, length, dtype=torch.bfloat16, device="meta")
    *copies, launch = OPERATORS[0].launches(projected, projected[..., 0, 0, 0], bias, 0)
    assert [copy.kernel for copy in copies] == ["attention.lay_out"] * (length == 17)
    assert launch.arguments["bias_strides"] == ((2 * 17 * 32, 17 * 32, 32, 1) if length == 17 else bias.stride())


def test_refuses_wide_heads() -> None:
    """Catches head widths that would not fit the registers being accepted."""
    with pytest.raises(ValueError, match="head width 65"):
        attention(torch.empty(1, 1, 2, 4, 1, 65), torch.ones(1, 1, 2))
