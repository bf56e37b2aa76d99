"""The exceptions for mistakes in the user's input.

Anything a user can get wrong (a file, a name, a number in a config) is raised as `UserError`. Its message is one line that
says where (file, line or residue), what was found against what was expected, and the fix. The command line prints that line
and exits with code 2; a traceback means a bug in evodsp.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from evodsp.reading.quoting import one_line


class UserError(Exception):
    """A mistake in the user's input: one line, no traceback, exit code 2.

    Messages quote files, and a file may hold anything: ends of lines become blanks, and the middle of a
    very long message is left out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(" ".join(message.splitlines())))


class MachineError(UserError):
    """The machine lacks something that every file needs: a run ends, and leaves no chain out."""


class SettingError(UserError):
    """A setting with a wrong value. `key` is its dotted name, such as 'model.evoformer.blocks'."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f"{key} is {value}, but must be {expected}")
        self.key = key


class FileFormatError(UserError):
    """A file whose content is not in the format that its name promises. `line` counts from 1."""

    def __init__(self, path: str | Path, message: str, line: int | None = None) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {message}")
        self.path, self.line = str(path), line


def nearest(word: str, choices: Iterable[str]) -> str:
    """' Did you mean X?' with the choice nearest to `word`, or an empty string if no choice is similar."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""
