"""Which lines of a package are running: for programs that say where they found something."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType


@cache
def folder_of(package: str) -> str:
    """The folder of an installed package, with a separator at its end. A checkout may have any name, the package's own too, so
    that the name of a folder says nothing."""
    spec = find_spec(package)
    assert spec is not None, package
    assert spec.origin is not None, package
    return f"{Path(spec.origin).parent}{os.sep}"


EVODSP = folder_of("evodsp")


def calling_lines(frame: FrameType | None, *others: str) -> Iterator[tuple[str, int]]:
    """Calls under way in files of evodsp, the innermost first: path within its folder, line. Of `others` too, whose
    paths begin with the package's name."""
    folders = {EVODSP: ""} | {folder_of(package): f"{package}/" for package in others}
    while frame is not None:
        file = frame.f_code.co_filename
        for folder, name in folders.items():
            if file.startswith(folder):
                yield name + file.removeprefix(folder), frame.f_lineno
        frame = frame.f_back
