"""Files that hold parameters: what kind one is, by its content, and how one is written."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Container = Literal["npz", "torch"]


def container(path: Path) -> Container | None:
    """Which program's file it is, whatever its name: NumPy's .npz, PyTorch's, or None if neither (or cut short)."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            members = file.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # the last two: a damaged directory
        return None
    if any(name.endswith(".npy") for name in members):
        return "npz"
    return "torch" if any(name.endswith("data.pkl") for name in members) else None


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A name to write to. The file appears under `path`, whole, when the block ends, and not at all if it fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
