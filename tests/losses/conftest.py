"""AlphaFold2's numbers, with which several tests of losses begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.shared import load


@pytest.fixture(scope="session")
def reference(golden: Path) -> dict[str, Tensor]:
    """Losses of a structure near the native one, what they were computed from, and their gradients."""
    return {key: torch.as_tensor(value) for key, value in load(golden / "losses_functions.npz").items()}


@pytest.fixture(scope="session")
def losses(golden: Path) -> dict[str, Tensor]:
    """The same of the structure that an untrained model predicted."""
    return {key: torch.as_tensor(value) for key, value in load(golden / "losses.npz").items()}


@pytest.fixture(scope="session")
def labels(golden: Path) -> dict[str, Tensor]:
    """Labels of a batch of one."""
    return {key: torch.from_numpy(value)[None] for key, value in load(golden / "labels.npz").items()}


@pytest.fixture(scope="session")
def features(golden: Path) -> dict[str, Tensor]:
    """Features of the first cycle, of a batch of one."""
    return {key: torch.from_numpy(value)[:1] for key, value in load(golden / "features_processed.npz").items()}
