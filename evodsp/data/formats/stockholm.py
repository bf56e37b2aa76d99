"""Stockholm alignments, as jackhmmer writes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from evodsp.data.formats.fasta import EITHER_CASE, byte_table
from evodsp.data.records import Alignment
from evodsp.errors import FileFormatError
from evodsp.geometry.residues import GAP
from evodsp.reading.text_files import text_of

_STOCKHOLM = byte_table(EITHER_CASE | dict.fromkeys("-._~", GAP))


def parse_stockholm(path: str | Path, data: bytes | None = None) -> Alignment:
    """A Stockholm alignment, in one block or interleaved ones, reduced to the columns of its first sequence, the query.

    Columns where the query has a gap are dropped; residues in them count as deletions before the next kept column, as in AF2.
    '#=GF', '#=GS', '#=GC' and '#=GR' lines are skipped. `data` as in `parse_a3m`.

    Raises FileFormatError (file and line) for a missing '# STOCKHOLM' header or '//' (a truncated file), rows of unequal
    length, an illegal character, and a query that consists of gaps.
    """
    lines = text_of(path, data).splitlines()
    rows: dict[bytes, list[bytes]] = {}
    line_of_row: dict[bytes, int] = {}
    end = alignment_end(path, lines, "write it again")
    for number, line in enumerate(islice(lines, end), 1):
        if line[:1] == b"#" or not (words := line.split()):
            continue
        if len(words) != 2:
            raise FileFormatError(path, f"expected 'name residues', found {len(words)} words; correct the line", number)
        name, chunk = words
        if name in rows:
            rows[name].append(chunk)
        else:
            rows[name], line_of_row[name] = [chunk], number
    if not rows:
        raise FileFormatError(path, "no sequences in the alignment; remove the file or run the search again")

    joined = {name: chunks[0] if len(chunks) == 1 else b"".join(chunks) for name, chunks in rows.items()}
    return columns_of_query(path, list(joined.items()), list(line_of_row.values()))


def columns_of_query(path: str | Path, rows: Sequence[tuple[bytes, bytes]], numbers: Sequence[int]) -> Alignment:
    """The alignment of aligned rows (name, row) of one length, reduced to the columns of the first one. `numbers`: their lines.

    Raises FileFormatError as `parse_stockholm` does for rows.
    """
    names, joined = tuple(name.decode() for name, _ in rows), [row for _, row in rows]
    width = len(joined[0])
    if row := next((k for k, chunk in enumerate(joined) if len(chunk) != width), None):
        raise FileFormatError(
            path,
            f"sequence '{names[row]}' has {len(joined[row])} columns, the first sequence '{names[0]}' has {width}; "
            f"correct the row or remove it",
            numbers[row],
        )
    codes = np.frombuffer(b"".join(joined).translate(_STOCKHOLM), np.uint8).reshape(len(joined), width)
    if (illegal := np.argwhere(codes > GAP)).size:
        row, column = (int(i) for i in illegal[0])
        letter = joined[row][column:].decode(errors="replace")[0]
        raise FileFormatError(path, f"illegal character {letter!r} in sequence '{names[row]}'; remove it", numbers[row])
    kept = codes[0] != GAP
    if not kept.any():
        raise FileFormatError(path, f"the query '{names[0]}' consists of gaps; put the query first", numbers[0])
    residues = np.ascontiguousarray(codes[:, kept]).view(np.int8)
    return Alignment(str(path), names, residues, _deletions_of_dropped(codes, kept))


def _deletions_of_dropped(codes: UInt8[np.ndarray, "N W"], kept: Bool[np.ndarray, " W"]) -> Integer[np.ndarray, "N L"]:
    """Number of residues in the dropped columns before each kept column."""
    shape, dropped = (len(codes), int(kept.sum())), np.flatnonzero(~kept)
    column = np.cumsum(kept)[dropped]  # index of the kept column after each dropped one
    dropped, column = dropped[column < shape[1]], column[column < shape[1]]
    if not dropped.size:
        return np.zeros(shape, np.uint8)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    # Transposed, a run of dropped columns is a block of contiguous rows, which `reduceat` adds fast.
    counts = np.add.reduceat((codes.T[dropped] != GAP).view(np.int8), first, axis=0, dtype=np.int32)
    deletions = np.zeros(shape, np.min_scalar_type(int(counts.max())))
    deletions[:, column[first]] = counts.T
    return deletions


def alignment_end(path: str | Path, lines: list[bytes], fix: str) -> int:
    """Index of the '//' line. Raises FileFormatError, which ends with `fix`, unless it closes a single Stockholm alignment."""
    first = next((k for k, line in enumerate(lines) if line.strip()), 0)
    if not lines[first].startswith(b"# STOCKHOLM"):
        raise FileFormatError(path, f"not a Stockholm file: its first line must be '# STOCKHOLM 1.0'; {fix}", first + 1)
    end = next((k for k, line in enumerate(lines) if line.rstrip() == b"//"), None)
    if end is None:
        raise FileFormatError(path, f"no '//' at the end: the file is truncated; {fix}", len(lines))
    if more := next((k for k in range(end + 1, len(lines)) if lines[k].strip()), None):
        raise FileFormatError(path, "text after '//': keep one alignment per file and split off the others", more + 1)
    return end
