"""Tests of programs stand beside them. `make verify` runs them, and CI where a program or what it imports has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, before `-m` chooses among them."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("verify")
