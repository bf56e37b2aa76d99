"""Input that runs code where it is unpickled, or would act on a terminal where it is shown."""

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


EVIL = "a\x1b[31m\x1b]0;owned\x07\r\x08\0\x7f\x9b\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\ud800\udcff"
SHOWN = r"a\x1b[31m\x1b]0;owned\x07\r\x08\x00\x7f\x9b\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff"
SHOWN += r"\ud800\udcff"
