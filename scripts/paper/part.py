"""A part of the reproduction: what it measures, and with which settings."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A line of a table: numbers and strings by the names of the columns."""
Tables = Mapping[str, Sequence[Row]]
"""Tables by name; each becomes a CSV file of this name."""
Tick = Callable[[str], None]
"""Called with what is measured next."""


@dataclass(frozen=True)
class Part:
    """Something that one option of `reproduce.py` measures."""

    name: str
    """Name of the part on the command line, and of its files."""
    settings: Mapping[str, Any]
    """All sizes, as JSON. A result is kept while these are equal …"""
    sources: Sequence[str]
    """… and these files of `scripts/paper`, besides the model, the methods and `evodsp.parallel`."""
    measure: Callable[[Tick], Tables]
    wrong: Callable[[Tables], list[str]] = lambda tables: []
    """What contradicts the paper's formulas; one line each."""


def read_csv(path: Path) -> list[Row]:
    """Read a table: whole numbers as int, other numbers as float, everything else, fractions too, as text."""
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
