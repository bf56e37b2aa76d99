"""The bundled sets that lie in an archive."""

from __future__ import annotations

import atexit
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path


@cache
def dimers() -> Path:
    """The synthetic dimers (data/README.md), unpacked once a process."""
    folder = Path(tempfile.mkdtemp(prefix="evodsp_dimers_"))
    atexit.register(shutil.rmtree, folder)
    with tarfile.open(Path(__file__).resolve().parents[2] / "data" / "dimers.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "dimers"
