"""Triton's outer product, computed by Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evodsp.model.kernels.triton import REPORTS
from tests.model.kernels import outer_product_cases as cases

Interpreter = Callable[..., Any]
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@PRECISIONS
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("shape", [(1, 4, 3, 5, 4, 6), (1, 9, 2, 130, 3, 20), (1, 3, 2, 7, 12, 130)], ids=str)
def test_agrees_with_the_formula(interpreter: Interpreter, shape: cases.Shape, mean: bool, dtype: torch.dtype) -> None:
    """Catches channels or columns in each other's place, tails of tiles, a bias that is not divided, and parts of the weight's
    gradient that are left out."""
    interpreter(cases.agrees, shape, dtype, mean)


@PRECISIONS
def test_several_samples_and_chunks(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Catches counts of other rows, and gradients of the last chunk only."""
    interpreter(cases.agrees, (2, 4, 5, 7, 4, 6), dtype, True, 2)


@pytest.mark.parametrize("shape", [(1, 3, 0, 4, 4, 6), (1, 3, 4, 0, 4, 6)], ids=str)
def test_empty_shards(interpreter: Interpreter, shape: cases.Shape) -> None:
    """Catches empty grids that are launched, and gradients of parameters that are left uninitialised."""
    interpreter(cases.agrees, shape, torch.float32)


def test_offsets_beyond_32_bits(interpreter: Interpreter) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(cases.far_apart_agrees)


def test_operators_are_sound(interpreter: Interpreter) -> None:
    """Catches fake results unlike real ones."""
    interpreter(cases.operators_are_sound)


def test_one_graph(interpreter: Interpreter) -> None:
    """Catches graph breaks, and two autograd nodes that torch.compile cannot follow."""
    interpreter(cases.compiled_alike)


def test_report_of_launches_and_bytes() -> None:
    """Catches launches that are not reported, and tensors that are moved but not counted. Needs no Triton."""
    r, c, z = 256, 32, 128
    products, weight, bias, grad = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((r, c, r, c), (z, c * c), (z,), (r, r, z))
    )
    counts = torch.empty(r, r, 1, device="meta")
    large, small, result, numbers = 2 * (r * c) ** 2, 2 * z * c * c, 2 * r * r * z, 4 * r * r
    assert REPORTS["evodsp::outer_projection"]((products, weight, bias, counts)) == (
        1,
        large + small + 2 * z + numbers + result,
    )
    backward = REPORTS["evodsp::outer_projection_backward"]((grad, products, weight, counts, torch.float32))
    scale = 2 * result + numbers + 256 * 2 * 4 * z + 4 * z  # parts of the bias's gradient, written and read
    of_weight = large + result + 33 * 2 * 4 * z * c * c + 4 * z * c * c
    assert backward == (5, scale + large + result + small + of_weight)


@pytest.mark.verify
@pytest.mark.parametrize("number", range(40))
def test_agrees_at_many_shapes(interpreter: Interpreter, number: int) -> None:
    """Catches sizes at which tiles and parts are cut wrong."""
    draw = random.Random(number)
    columns, results = draw.choice([1, 5, 16, 63, 127, 129]), draw.choice([1, 6, 16, 33, 128, 129])
    shape = (
        draw.choice([1, 2]),
        draw.choice([1, 3, 17]),
        draw.choice([1, 2, 5]),
        columns,
        draw.choice([1, 3, 8]),
        results,
    )
    dtype = torch.float32 if number % 2 else torch.float16
    interpreter(cases.agrees, shape, dtype, number % 3 > 0, draw.choice([0, 0, 1, 2]))
