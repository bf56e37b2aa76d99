"""Reference files beside the checkout: where they are, and how they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHARED = Path(__file__).resolve().parents[2] / "shared"


def load(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file."""
    with np.load(path) as file:
        return {key: file[key] for key in file.files}
