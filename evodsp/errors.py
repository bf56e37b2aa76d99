"""The exceptions for mistakes in the user's input.

Anything a user can get wrong (a file, a name, a number in a config) is raised as `UserError`. Its message is one line that
says where (file, line or residue), what was found against what was expected, and the fix. The command line prints that line
and exits with code 2; a traceback means a bug in evodsp.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from pathlib import Path

from evodsp.printing import quoted

_LONGEST_MESSAGE = 2000
"""Letters. The longest that we write lists all options of a group."""


class UserError(Exception):
    """A mistake in the user's input: one line, no traceback, exit code 2.

    Messages quote files, and a file may hold anything: ends of lines become blanks, and the middle of a
    very long message is left out.
    """

    def __init__(self, message: str = "") -> None:
        message = " ".join(message.splitlines())
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[: _LONGEST_MESSAGE // 2]} […] {message[-_LONGEST_MESSAGE // 4 :]}"
        super().__init__(message)


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


_LONGEST_SHOWN = 200
"""Letters of what a file or a library says."""


def shown(value: object) -> str:
    """A value from a file as a message quotes it: `repr`, without its inner parts and its middle where it is long."""
    return _short_repr.repr(value)


def shortened(text: object) -> str:
    """What a file or a library's error says, as one line of modest length. An error without text is its name."""
    return quoted(str(text), _LONGEST_SHOWN) or type(text).__name__


_short_repr = reprlib.Repr()
_short_repr.maxlevel, _short_repr.maxstring, _short_repr.maxlong, _short_repr.maxother = 3, 60, 60, 60


def nearest(word: str, choices: Iterable[str]) -> str:
    """' Did you mean X?' with the choice nearest to `word`, or an empty string if none is similar."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""
