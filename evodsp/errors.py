"""The exceptions for mistakes in the user's input, and the check of settings against the numbers and sizes that are
allowed.

Anything a user can get wrong (a file, a name, a number in a config) is raised as `UserError`. Its message is one line that
says where (file, line or residue), what was found against what was expected, and the fix. The command line prints that line
and exits with code 2; a traceback means a bug in evodsp.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from evodsp.printing import one_line


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


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have. All are finite."""

    least: int
    below: int | None = None
    """Upper bound, excluded; None: no bound."""
    least_excluded: bool = False
    most: int | None = None
    """Upper bound, included; None: no bound."""

    def __contains__(self, value: int | float) -> bool:
        high_enough = value > self.least if self.least_excluded else value >= self.least
        low_enough = (self.below is None or value < self.below) and (self.most is None or value <= self.most)
        return math.isfinite(value) and high_enough and low_enough

    def __str__(self) -> str:
        lower = f"above {self.least}" if self.least_excluded else f"at least {self.least}"
        if self.most is not None:
            return f"{lower} and at most {self.most}"
        return lower if self.below is None else f"{lower} and below {self.below}"


SIZE, COUNT, POSITIVE = Range(1), Range(0), Range(0, least_excluded=True)
FRACTION = Range(0, most=1)
BELOW_ONE = Range(0, 1)
"""Range of dropout rates, which scale by 1 / (1 - p), and of decays."""
SEED = Range(0, 2**32)
"""Range of seeds that NumPy's generators take."""


def check_numbers(settings: Any, ranges: Mapping[str, Range], where: str) -> None:
    """Raise SettingError for the first number of `settings` out of its range. None, which turns a setting off, is in range.

    `settings`: a dataclass, or a dictionary of options. `ranges`: ranges by name. `where`: prefix of the names in messages,
    such as 'data.train.' or '--'.
    """
    fields = getattr(settings, "__dataclass_fields__", {})
    for name, allowed in ranges.items():
        value = settings[name] if isinstance(settings, Mapping) else getattr(settings, name)
        if value is None:
            continue
        whole = name in fields and str(fields[name].type).split(" | ")[0] == "int"  # declared as an integer
        is_number = isinstance(value, Integral if whole else Real)
        if not is_number:
            raise SettingError(f"{where}{name}", repr(value), f"a {'whole ' if whole else ''}number {allowed}")
        if value not in allowed:
            raise SettingError(f"{where}{name}", value, "finite" if value == math.inf else str(allowed))


_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def memory_size(setting: str, value: str) -> int:
    """The bytes of a size such as '512MB' or '1.5GiB'. Raises SettingError unless `value` is one. `setting`: its name."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", value)
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        raise SettingError(setting, f"'{value}'", f"a size such as 512MB or 4GB (units: {', '.join(_UNITS)})")
    return int(float(found[1]) * _UNITS[found[2]])
