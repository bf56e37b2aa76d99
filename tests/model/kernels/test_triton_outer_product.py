"""Triton's outer product, computed by Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from evodsp.model.kernels import by_chunks
from evodsp.model.kernels.by_chunks import Sums
from evodsp.model.kernels.triton import REPORTS, outer_product, transition
from evodsp.model.kernels.triton_kernels.outer_product import form, project, project_backward
from tests.model.kernels.interpreter import check, far_apart, random

Shape = tuple[int, int, int, int, int, int]
"""B, S, I, J, c, z."""


def formula(left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None) -> Tensor:
    total = torch.einsum("bsix,bsjy->bijxy", left, right).flatten(-2) @ weight.T
    if bias is not None:
        total = total + bias
    return total if counts is None else total / counts


def agrees(shape: Shape, dtype: torch.dtype, mean: bool = True, rows: int = 0) -> None:
    """The result and all gradients. `rows`: rows of a chunk; 0: all in one."""
    batch, sequences, i, j, c, z = shape
    draw = random(sum(shape), dtype)
    scale = max(1, sequences) ** -0.5  # the products are rounded, and fp16 ends at 65,504
    tensors: dict[str, Tensor | None] = {
        "left": draw(batch, sequences, i, c) * scale,
        "right": draw(batch, sequences, j, c),
        "weight": draw(z, c * c) / c,
        "bias": draw(z) if mean else None,
    }
    counts = random(1, torch.float32)(batch, i, j, 1).abs() + 1 if mean else None
    chunk = rows * j * c * c
    with patch.object(by_chunks, "CPU_NUMBERS", chunk or 1 << 40):
        check(outer_product, formula, tensors, {"counts": counts})


def far_apart_agrees() -> None:
    """Rows of the gradient and of the counts, and results of the weight, lie 2^31 elements apart; the pages between them are
    never touched."""
    draw, stride = random(3, torch.float16), (1 << 31) - 16
    products, weight = form(draw(2, 3, 4), draw(2, 5, 4)), draw(3, 16)
    grad, counts = draw(3, 5, 3), draw(3, 5, 1).abs() + 1
    results = []
    for far in (False, True):
        some = [far_apart(x, 0, stride) if far else x for x in (grad, weight, counts)]
        sums = Sums([(0, slice(None))], weight, draw(3))
        slope = project_backward(some[0], products, some[1], some[2], sums)
        results.append([project(products, some[1], None, some[2]), slope, *sums.results()])
    for near, away in zip(*results, strict=True):
        assert torch.equal(near, away)


def operators_are_sound() -> None:
    """torch's own checks of the operators."""
    draw, ops = random(4, torch.float32), torch.ops.evodsp
    products, weight, bias, counts = draw(3, 4, 5, 4), draw(6, 16), draw(6), draw(3, 5, 1).abs() + 1
    for rest in ((bias, counts), (None, None)):
        torch.library.opcheck(
            ops.outer_projection.default, (products, weight, *rest), test_utils=("test_schema", "test_faketensor")
        )
        torch.library.opcheck(
            ops.outer_projection_backward.default,
            (draw(3, 5, 6), products, weight, rest[1], torch.float32),
            test_utils=("test_schema", "test_faketensor"),
        )


def compiled_alike() -> None:
    """One graph of torch.compile with the same gradients, of the outer product and of a transition."""
    draw = random(6, torch.float32)
    counts = draw(1, 5, 7, 1).abs() + 1
    outer = [draw(1, 4, 5, 4), draw(1, 4, 7, 4), draw(6, 16), draw(6)]
    perceptron = [draw(1, 4, 5, 8), draw(8), draw(8), draw(16, 8), draw(16), draw(8, 16), draw(8)]
    for function, inputs in ((lambda *xs: outer_product(*xs, counts), outer), (transition, perceptron)):
        leaves = [x.requires_grad_() for x in inputs]
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = [torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (function, compiled)]
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


Interpreter = Callable[..., Any]


@pytest.mark.parametrize(
    ("shape", "dtype", "mean", "rows"),
    [
        *(((1, 4, 3, 5, 4, 6), dtype, mean, 0) for dtype in (torch.float32, torch.float16) for mean in (True, False)),
        ((1, 9, 2, 130, 3, 20), torch.float32, True, 0),
        ((1, 3, 2, 7, 12, 130), torch.float16, True, 0),
        ((2, 4, 5, 7, 4, 6), torch.float32, True, 2),
        ((1, 3, 0, 4, 4, 6), torch.float32, True, 0),
        ((1, 3, 4, 0, 4, 6), torch.float32, True, 0),
    ],
    ids=str,
)
def test_agrees_with_the_formula(
    interpreter: Interpreter, shape: Shape, dtype: torch.dtype, mean: bool, rows: int
) -> None:
    """Catches channels or columns in each other's place, tails of tiles, a bias that is not divided, parts of the weight's
    gradient that are left out, counts of other rows, gradients of the last chunk only, empty grids that are launched, and
    gradients of parameters that are left uninitialised."""
    interpreter(agrees, shape, dtype, mean, rows)


def test_offsets_beyond_32_bits(interpreter: Interpreter) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(far_apart_agrees)


def test_operators_are_sound(interpreter: Interpreter) -> None:
    """Catches fake results unlike real ones."""
    interpreter(operators_are_sound)


def test_one_graph(interpreter: Interpreter) -> None:
    """Catches graph breaks, and two autograd nodes that torch.compile cannot follow."""
    interpreter(compiled_alike)


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
    draw = Random(number)
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
    interpreter(agrees, shape, dtype, number % 3 > 0, draw.choice([0, 0, 1, 2]))
