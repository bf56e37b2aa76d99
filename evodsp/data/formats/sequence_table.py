"""Tables of sequences, as ColabFold takes them: CSV files with the columns `id` and `sequence`, in any order."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from evodsp.data.formats.fasta import FastaRecord, Records, read_record
from evodsp.errors import FileFormatError
from evodsp.reading.quoting import quoted
from evodsp.reading.text_files import text_of

_COLUMNS = ("id", "sequence")
_FIX = "write a first line 'id,sequence', and below it a line for each record"


def read_sequence_table(path: str | Path) -> list[FastaRecord]:
    """The records of a table, each with its name or the error in it, as `read_fasta` reads those of a FASTA file.

    A sequence may have several chains, with ':' between them. Letters that are no amino acid are replaced. Columns with other
    names, and lines without anything in them, are left out.

    Raises FileFormatError (file and line) for a table without one of the two columns, without a record, or with a line that
    cannot be split.
    """
    rows = csv.reader(io.StringIO(text_of(path).decode(), newline=""), skipinitialspace=True)
    found: list[FastaRecord] = []
    line_of_name: dict[str, int] = {}
    try:
        heading = [name.strip().lower() for name in next(rows, [])]
        if lost := [name for name in _COLUMNS if name not in heading]:
            raise FileFormatError(path, f"a table without a column '{lost[0]}'; {_FIX}", 1)
        places = [heading.index(name) for name in _COLUMNS]
        before = rows.line_num
        for row in rows:
            line, before = before + 1, rows.line_num  # a quoted cell may have several lines
            if not any(cell.strip() for cell in row):
                continue
            if len(row) <= max(places):
                raise FileFormatError(path, f"{len(row)} cells, but the first line has {len(heading)} columns", line)
            name, letters = (row[place].strip() for place in places)
            body = letters.encode()
            one = Records(path, [name], [line - 1], [[body]], [body])
            found.append(read_record(one, name, line, line_of_name, substitute=True, several=True))
    except csv.Error as error:
        raise FileFormatError(path, f"not a CSV table ({quoted(error)}); {_FIX}", rows.line_num) from error
    if not found:
        raise FileFormatError(path, f"a table without a record; {_FIX}")
    return found
