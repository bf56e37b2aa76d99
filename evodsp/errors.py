"""The one exception that stands for a mistake of the user's.

Anything a user can get wrong (a file, a name, a number in a config) is raised as `UserError` with a message of one
line that says where (file, line or residue), what was found against what was expected, and how to mend it. The command
line prints that line and exits with code 2; a traceback is reserved for our own mistakes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A mistake in the user's input: one line, no traceback, exit code 2."""


class FileFormatError(UserError):
    """A file that is not what its name promises. `line` counts from 1."""

    def __init__(self, path: str | Path, message: str, line: int | None = None) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {message}")
        self.path, self.line = str(path), line


def nearest(word: str, choices: Iterable[str]) -> str:
    """' Did you mean X?' for the choice nearest to `word`, or the empty string when none is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""
