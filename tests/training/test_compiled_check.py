"""The comparison of small compiled blocks with uncompiled ones, with which `compile: blocks` begins."""

from __future__ import annotations

import pytest
import torch

from tests.builders.compiled_check_cases import refusal
from tests.ranks import in_a_fork


@pytest.mark.verify
@pytest.mark.parametrize("half", [False, True])
def test_a_right_backend_compiles(half: bool) -> None:
    """Catches a false alarm: rounding errors, and gradients that are nothing else."""
    assert in_a_fork(refusal, "right", half) == ""


@pytest.mark.verify_but("wrong_gradient*")
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("wrong_result", "a block's MSA stack: result 1 differs by 1.0e-01 of its size"),
        ("wrong_gradient", "a block's MSA stack: the gradient of input 1 differs by 5.0e-01 of its size"),
        ("broken", "OSError: no code"),
    ],
)
def test_a_wrong_backend_is_refused(backend: str, said: str) -> None:
    """Catches a run that trains on wrong numbers, as with torch 2.11: results were right, and gradients were not."""
    message = in_a_fork(refusal, backend, False)
    assert said in message
    assert f"torch {torch.__version__}" in message
    assert "set compile to none" in message
    assert "\n" not in message
