"""Tables of sequences, as ColabFold takes them: CSV files with the columns `id` and `sequence`, in any order.

Cells are separated by commas, or by semicolons or tabs, as spreadsheets of some countries write them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from evodsp.data.formats.fasta import FastaRecord, Records, read_record
from evodsp.errors import FileFormatError
from evodsp.printing import quoted
from evodsp.reading.text_files import text_of

_COLUMNS = ("id", "sequence")
_SEPARATORS = (",", ";", "\t")
_FIX = "write a first line 'id,sequence', and below it a line for each record"


def read_sequence_table(path: str | Path) -> list[FastaRecord]:
    """The records of a table, each with its name or the error in it, as `read_fasta` reads those of a FASTA file.

    A sequence may have several chains, with ':' between them, and line breaks. Letters that are no amino acid are replaced.
    Columns with other names, and lines without anything in them, are left out. A line with too few cells, with a cell beyond
    the columns, or without a name or a sequence is a record with an error.

    Raises FileFormatError (file and line) for a table without one of the two columns, without a record, or with a quotation
    mark that is not closed.
    """
    text = text_of(path).decode()
    separator = _separator(text)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    found: list[FastaRecord] = []
    line_of_name: dict[str, int] = {}
    before = 0
    try:
        first_row = next(rows, [])
        heading = [name.strip().lower() for name in first_row]
        if lost := [name for name in _COLUMNS if name not in heading]:
            first = quoted(separator.join(first_row))
            raise FileFormatError(path, f"a table without a column '{lost[0]}': its first line is '{first}'; {_FIX}", 1)
        places = [heading.index(name) for name in _COLUMNS]
        before = rows.line_num
        for row in rows:
            line, before = before + 1, rows.line_num  # a quoted cell may have several lines
            if any(cell.strip() for cell in row):
                found.append(_record(path, line, row, len(heading), places, line_of_name))
    except csv.Error as error:
        problem = f"not a CSV table ({quoted(error)}); look for a quotation mark that is not closed"
        raise FileFormatError(path, problem, before + 1) from error
    if not found:
        raise FileFormatError(path, f"a table without a record; {_FIX}")
    return found


def _separator(text: str) -> str:
    """What separates the cells: the first that makes both columns of the first line, or else a comma."""
    first = text.splitlines()[0]
    for separator in _SEPARATORS:
        if {cell.strip(' "').lower() for cell in first.split(separator)} >= set(_COLUMNS):
            return separator
    return _SEPARATORS[0]


def _record(
    path: str | Path, line: int, row: Sequence[str], columns: int, places: Sequence[int], line_of_name: dict[str, int]
) -> FastaRecord:
    """The record of a line, or its error. `columns`: the number of cells in the first line. `places`: those of the name and
    of the sequence. `line_of_name`: see `read_record`."""
    cells = [cell.strip() for cell in row] + [""] * (columns - len(row))
    name, letters = (cells[place] for place in places)
    problem = None
    if any(cells[columns:]):
        fix = "put a cell with a separator in it into quotation marks, or name the column in the first line"
        problem = f"{len(row)} cells, but the first line has {columns} columns; {fix}"
    elif not name:
        problem = "a line without a name; write one into the column 'id', or remove the line"
    elif not letters:
        problem = f"'{name}' has no sequence; write it into the column 'sequence', or remove the line"
    if problem is not None:
        return FastaRecord(name, line, FileFormatError(path, problem, line), substituted=False)
    body = [part.encode() for part in letters.splitlines()]
    given = Records(path, [name], [line - 1], [body], [b"".join(body)])
    return read_record(given, name, line, line_of_name, substitute=True, several=True)
