"""The comparison of small compiled blocks with uncompiled ones, with which `compile: blocks` begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.builders.compiled_check_cases import refusal
from tests.model.kernels.interpreter import interpreting_process


@pytest.fixture(scope="module")
def process() -> Iterator[Callable[..., Any]]:
    with interpreting_process() as call:
        yield call


@pytest.mark.parametrize("half", [False, True])
def test_a_right_backend_compiles(process: Callable[..., Any], half: bool) -> None:
    """Catches a false alarm: rounding errors, and gradients that are nothing else."""
    assert process(refusal, "right", half) == ""


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("wrong_result", "a block's MSA stack: result 1 differs by 1.0e-01 of its size"),
        ("wrong_gradient", "a block's MSA stack: the gradient of input 1 differs by 5.0e-01 of its size"),
        ("broken", "OSError: no code"),
    ],
)
def test_a_wrong_backend_is_refused(process: Callable[..., Any], backend: str, said: str) -> None:
    """Catches a run that trains on wrong numbers, as with torch 2.11: results were right, and gradients were not."""
    message = process(refusal, backend, False)
    assert said in message
    assert f"torch {torch.__version__}" in message
    assert "set compile to none" in message
    assert "\n" not in message
