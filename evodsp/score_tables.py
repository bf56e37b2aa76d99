"""Tables as files: scores of `evodsp score`, `validate` and `test`, and the list of predictions."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.printing import printable


def write_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows, rounded to 4 decimals, as .csv or .json by the suffix of `path`, whole or not at all."""
    if path.suffix not in (".csv", ".json"):
        raise UserError(f"{path}: scores can be written as .csv or .json, not as '{path.suffix}'; rename it")
    values = [
        {name: round(value, 4) if isinstance(value := row.get(name), float) else value for name in columns}
        for row in rows
    ]
    write_text(path, json.dumps(values, indent=2) + "\n" if path.suffix == ".json" else csv_text(columns, values))


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """A table as CSV: every table that evodsp writes. A text that a spreadsheet would compute, such as the name `=2+3`, begins
    with an apostrophe, which says that it is text."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([map(_csv_cell, columns), *(map(_csv_cell, map(row.get, columns)) for row in rows)])
    return file.getvalue()


def _csv_cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_COMPUTED) else printable(value)


_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet computes."""
