"""Scores as a table for a terminal, and as files."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evodsp.errors import UserError
from evodsp.reading.quoting import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Column = tuple[str, str, str, str]
"""The field of a row, its heading, the format of its numbers ('' for texts), and what it means."""


def table(columns: Sequence[Column], rows: Sequence[DataclassInstance]) -> str:
    """The rows as text, one line each, then one line of explanation per column."""
    cells = [[heading for _, heading, _, _ in columns]]
    cells += [[_cell(getattr(row, field), style) for field, _, style, _ in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [style == "" for _, _, style, _ in columns]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, texts, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    longest = max(len(heading) for _, heading, _, _ in columns)
    legend = [f"{heading:<{longest}}  {meaning}" for _, heading, _, meaning in columns]
    return "\n".join([*lines, "", *legend])


def _cell(value: object, style: str) -> str:
    return "–" if value is None or value == "" else format(value, style)


def write_rows(rows: Sequence[DataclassInstance], path: Path, kind: type[DataclassInstance]) -> None:
    """Write the rows, rounded to 4 decimals, as .csv or .json by the suffix of `path`. `kind`: the class of the rows."""
    values = [
        {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(row).items()
        }
        for row in rows
    ]
    if path.suffix == ".json":
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return
    if path.suffix != ".csv":
        raise UserError(f"{path}: scores can be written as .csv or .json, not as '{path.suffix}'; rename it")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: printable(value) if isinstance(value, str) else value for name, value in row.items()}
            for row in values
        )
