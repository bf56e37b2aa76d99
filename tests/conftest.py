"""Shared fixtures. Every test checks the shapes in signatures at run time (jaxtyping and beartype)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Started in the background of a script, this process ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook(["evodsp", "scripts.paper.transformer", "scripts.paper.methods"], "beartype.beartype")

import numpy as np  # noqa: E402  (the hook must be installed before evodsp is imported)
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

from collections.abc import Iterator  # noqa: E402

from tests.ranks import RankPool  # noqa: E402
from tests.selection import (  # noqa: E402, F401  (hooks of pytest)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_terminal_summary,
)

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run with an incomplete set of reference files. Without any of them, the tests that need them are skipped."""
    if SHARED.is_dir():
        missing = [name for name in ("golden/INDEX.txt", "data/README.md") if not (SHARED / name).is_file()]
        if missing:
            raise pytest.UsageError(f"{SHARED} is there but {', '.join(missing)} is not: parity cannot be tested")


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
def pool() -> Iterator[RankPool]:
    """Ranks that communicate through gloo, started once per session."""
    ranks = RankPool()
    yield ranks
    ranks.stop()


def load(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file."""
    with np.load(path) as file:
        return {key: file[key] for key in file.files}
