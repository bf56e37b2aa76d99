"""Input that runs code where it is unpickled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.trace,)
