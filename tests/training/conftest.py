"""Fixtures of the training tests: two chains on disk, and ranks that wait for command lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.training import CommandPool
from tests.builders.training_chains import write_chains


@pytest.fixture(scope="module", autouse=True)
def every_test_has_them(parsers: None) -> None:
    """The parsers that are kept."""


@pytest.fixture(scope="session")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with alignments/, mmcif_files/ and tiny.yaml."""
    return write_chains(tmp_path_factory.mktemp("chains"))


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandPool]:
    """Ranks that wait for command lines."""
    ranks = CommandPool()
    yield ranks
    ranks.stop()
