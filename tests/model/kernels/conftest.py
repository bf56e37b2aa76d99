"""Fixtures of the tests of Triton kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.model.kernels.interpreter import interpreting_process


@pytest.fixture(scope="session")
def triton_installed() -> None:
    """Skips a test that interprets or compiles kernels where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (the extra `triton`; `make test` adds it)")


@pytest.fixture(scope="session")
def interpreter(triton_installed: None) -> Iterator[Callable[..., Any]]:
    """`call(function, *arguments)` in a process where Triton interprets kernels, one for the session."""
    with interpreting_process() as call:
        yield call
