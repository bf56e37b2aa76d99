"""What kind of file holds parameters: NumPy's or PyTorch's, by its content."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

Container = Literal["npz", "torch"]


def container(path: Path) -> Container | None:
    """The kind of file by its content, not its name: NumPy's .npz, PyTorch's, or None if neither (or cut short)."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            members = file.namelist()
    # A damaged directory of the archive raises ValueError or NotImplementedError.
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None
    if any(name.endswith(".npy") for name in members):
        return "npz"
    return "torch" if any(name.endswith("data.pkl") for name in members) else None
