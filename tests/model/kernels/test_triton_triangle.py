"""The fused triangle multiplication, computed by Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.kernels import triangle_cases as cases

Interpreter = Callable[..., Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@pytest.mark.verify_but("(2, 5, 64)-True-1-torch.float16", "(2, 5, 64)-False-2-torch.float32")
@pytest.mark.parametrize(
    ("shape", "outgoing", "shared_dim", "dtype"),
    [
        (*case, dtype)
        for case in [
            ((2, 5, 64), True, 1),
            ((2, 5, 64), False, 2),
            ((1, 17, 128), False, 1),
            ((1, 17, 128), True, None),
        ]
        for dtype in (torch.float32, torch.float16)
    ],
    ids=str,
)
def test_agrees_with_the_formula(
    interpreter: Interpreter, shape: tuple[int, int, int], outgoing: bool, shared_dim: int | None, dtype: torch.dtype
) -> None:
    """Catches samples, operands, directions or masks of dropout in each other's place, tails of tiles, parts of sums that are
    left out, a residual that is lost, and a gradient of any parameter that is wrong."""
    interpreter(cases.agrees, shape, dtype, outgoing, shared_dim)


@pytest.mark.verify_but("(2, 3, 7, 64)*")
@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 7, 64), (1, 2, 130, 128)], ids=str)
def test_the_operands_of_a_shard(
    interpreter: Interpreter, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Catches rows in place of columns, and gradients of a gate or a residual that are not there."""
    interpreter(cases.operands_agree, shape, dtype)


@DTYPES
@pytest.mark.parametrize(
    ("shape", "shared_dim", "last"),
    [((2, 3, 7, 64), 1, True), ((2, 7, 3, 64), 2, True), ((1, 2, 34, 128), 1, True), ((1, 3, 5, 64), None, False)],
    ids=str,
)
def test_the_output_of_a_shard(
    interpreter: Interpreter, shape: tuple[int, int, int, int], dtype: torch.dtype, shared_dim: int | None, last: bool
) -> None:
    """Catches channels in place of positions, another shard's mask of dropout, and a gradient without the gate or residual."""
    interpreter(cases.output_agrees, shape, dtype, shared_dim, last)


def test_draws_the_same_mask(interpreter: Interpreter) -> None:
    """Catches numbers that differ from other operators', so that a recomputation or another backend drops other entries."""
    interpreter(cases.draws_the_same_mask)


def test_is_chosen_where_it_fits(interpreter: Interpreter) -> None:
    """Catches kernels for widths, precisions or empty pairs that they were not made for."""
    interpreter(cases.chosen_where_it_fits)


def test_falls_back_by_the_card(interpreter: Interpreter) -> None:
    """Catches kernels on a card that cannot launch them, whose self-check would refuse the operator at all widths, and a look
    at the card that torch.compile cannot follow."""
    interpreter(cases.falls_back_by_the_card)
