"""Shared fixtures, and the options with which CI runs a part of the verify tests."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.process  # noqa: F401  (before evodsp; it stops the garbage collector)
from tests.builders.kept_parsers import kept_parsers
from tests.ranks import RankPool
from tests.selection import (  # noqa: F401  (hooks of pytest)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_mark_verify_but,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_terminal_summary,
)
from tests.shared import SHARED


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run with an incomplete set of reference files. Without any of them, the tests that need them are skipped."""
    if SHARED.is_dir():
        missing = [name for name in ("golden/INDEX.txt", "data/README.md") if not (SHARED / name).is_file()]
        if missing:
            raise pytest.UsageError(f"{SHARED} is there but {', '.join(missing)} is not: parity cannot be tested")


def pytest_collection_finish() -> None:
    """What is there by now stays, so that the garbage collector need not look through it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At its end an interpreter lets go of everything."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of reference arrays computed by DeepMind's AlphaFold2."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/golden beside this checkout")
    return SHARED / "golden"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real structures and alignments in OpenFold's layout."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED / "data"


@pytest.fixture(scope="session")
def triton_installed() -> None:
    """Skips a test that interprets or compiles kernels where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (the extra `triton`; `make test` adds it)")


@pytest.fixture(scope="module")
def parsers() -> Iterator[None]:
    """Command lines in this process have one parser."""
    with kept_parsers():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that communicate through gloo, started once per session."""
    ranks = RankPool()
    yield ranks
    ranks.stop()
