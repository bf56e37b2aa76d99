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


def archive_damage(path: Path) -> str | None:
    """What is wrong with a file of PyTorch, by the checksums that it contains; None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (entry := archive.testzip()) is not None:
                return f"{entry} has another checksum"
            # The archive's directory has no checksum. PyTorch would read nothing from an entry marked as a folder.
            if marked := [entry.filename for entry in archive.infolist() if entry.external_attr]:
                return f"{marked[0]} is no file"
    except Exception as error:  # a damaged directory can raise any exception
        return first_sentence(error)
    return None


def first_sentence(error: Exception) -> str:
    """What an error about a damaged file says, without PyTorch's advice."""
    return str(error).partition(". ")[0] or "cut short"
