"""Fixtures of the tests of Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.model.kernels.interpreter import interpreting_process


@pytest.fixture(scope="session")
def interpreter(triton_installed: None) -> Iterator[Callable[..., Any]]:
    """`call(function, *arguments)` in a process where Triton interprets kernels, one for the session."""
    with interpreting_process() as call:
        yield call
