"""Scores of structures as a table for a terminal, and as files; the columns of `evodsp score`, `validate` and `test`."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.reading.quoting import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Column = tuple[str, str, str, str]
"""The field of a row, its heading, the format of its numbers ('' for texts), and what it means."""


@dataclass(frozen=True)
class ChainScores:
    """Scores of a prediction against the experiment, over the residues whose CA the experiment resolves."""

    chain: str
    split: str
    """Name of the set that the chain belongs to, such as 'train' or 'held-out'."""
    residues: int
    """Length of the predicted chain."""
    resolved: int
    """Number of residues compared: residues with a CA in the experiment."""
    plddt: float
    """Mean pLDDT, 0..100: of all residues, in `validate` and `test` of those compared."""
    lddt_ca: float
    """0..1."""
    rmsd: float
    """RMSD of the CA atoms after superposition, Å."""
    gdt_ts: float
    """0..1."""
    tm_score: float
    """0..1, normalised by the number of residues compared."""


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
    """Write the rows, rounded to 4 decimals, as .csv or .json by the suffix of `path`, whole or not at all. `kind`: the class
    of the rows."""
    values = [
        {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(row).items()
        }
        for row in rows
    ]
    if path.suffix not in (".csv", ".json"):
        raise UserError(f"{path}: scores can be written as .csv or .json, not as '{path.suffix}'; rename it")
    columns = [field.name for field in dataclasses.fields(kind)]
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
