"""Operators under torch.compile: the same results and gradients, on every version of torch that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evodsp.model.kernels.operators import OPERATORS
from tests.model.kernels import compiled_operators
from tests.ranks import in_a_fork

# Those that are an autograd.Function around pieces that differ from `chunked`'s.
OF_PIECES = ["gated_linear", "gated_output", "gated_projection"]


@pytest.mark.verify_but("triangle_multiplication")
@pytest.mark.parametrize("operator", OPERATORS)
def test_chunked(operator: str) -> None:
    """Catches an operation in place whose result a Function returns: with torch 2.11 all gradients were 0."""
    functions = {"layer_norm": 0, "dropout_add": 0, "linear": 0}
    # Two shards, in the example; product and output; gate and output.
    functions |= {"global_attention": 2, "triangle_multiplication": 2, "gated_output": 2}
    assert in_a_fork(compiled_operators.check, "chunked", operator) == functions.get(operator, 1)


@pytest.mark.verify
@pytest.mark.parametrize("operator", OF_PIECES)
def test_triton(interpreter: Callable[..., Any], operator: str) -> None:
    """Catches the same of the pieces that GPUs take: `contiguous` with nothing to do, for example."""
    assert interpreter(compiled_operators.check, "triton", operator) == (2 if operator == "gated_output" else 1)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("dtype", "functions"),
    [
        pytest.param(torch.float32, 2, id="separate"),
        pytest.param(torch.float16, 1, id="fused"),
    ],
)
def test_triangle_multiplication(interpreter: Callable[..., Any], dtype: torch.dtype, functions: int) -> None:
    """Catches the same of its separate and of its fused kernels."""
    assert interpreter(compiled_operators.check, "triton", "triangle_multiplication", dtype) == functions
