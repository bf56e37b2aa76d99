"""FASTA, A3M and Stockholm into records, with whole-file byte operations instead of a loop over characters.

A file is split into lines once; the residues of all sequences are joined, translated through one 256-entry table and
viewed as a NumPy array, so that match columns, insertions and illegal bytes are boolean masks over the whole alignment.

Letters become AF2's codes directly (`geometry.alphabet.ALIGNMENT_CODES`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32, UInt8

from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.text_files import check_text, read_bytes, unpack
from evodsp.errors import FileFormatError
from evodsp.geometry.alphabet import ALIGNMENT_CODES, GAP

_INSERT, _SKIP, _ILLEGAL = 100, 101, 102
_UNFIT_FOR_FILES = re.compile(r'[/\\:*?"<>\x00-\x1f\x7f]|^[.-]')
_LONGEST_NAME = 200


def _table(codes: dict[str, int]) -> bytes:
    """A translation table for `bytes.translate`: `codes` where given, `_ILLEGAL` elsewhere."""
    table = bytearray([_ILLEGAL] * 256)
    for letter, code in codes.items():
        table[ord(letter)] = code
    return bytes(table)


_BLANKS = b" \t\v\f"
_WHITESPACE = dict.fromkeys(_BLANKS.decode(), _SKIP)
_LOWER_CASE = {letter.lower(): code for letter, code in ALIGNMENT_CODES.items()}
# A dot in A3M is padding opposite another row's insertion: it stands for nothing.
_A3M = _table(
    ALIGNMENT_CODES | dict.fromkeys(map(str.lower, ALIGNMENT_CODES), _INSERT) | {"-": GAP, ".": _SKIP} | _WHITESPACE
)
_STOCKHOLM = _table(ALIGNMENT_CODES | _LOWER_CASE | dict.fromkeys("-._~", GAP))
_FASTA = _table({c: k for c, k in (ALIGNMENT_CODES | _LOWER_CASE).items() if c.upper() not in "BJOUZ"} | _WHITESPACE)


def parse_fasta(path: str | Path) -> list[ProteinSequence]:
    """The sequences of a FASTA file, in its order. Letters: the 20 amino acids and X, either case.

    Names (the first word of a header) become names of folders, so they must be fit for that and differ from one another.

    Raises FileFormatError (file and line) for residues before the first header, a header without sequence, an illegal letter,
    a name that is missing, repeated or unfit for a file.
    """
    records = _split_records(path, read_bytes(path), "a FASTA")
    _translate(
        records, _FASTA, "write X, or the amino acid it stands for (U: C, O: K, B: D or N, Z: E or Q, J: I or L)"
    )
    sequences: list[ProteinSequence] = []
    line_of_name: dict[str, int] = {}
    for header, line, row in zip(records.headers, records.header_lines, records.rows, strict=True):
        name, *description = header.split(maxsplit=1) or [""]
        _check_name(path, name, line)
        if name in line_of_name:
            first = line_of_name[name]
            raise FileFormatError(
                path, f"the name '{name}' was used on line {first} already; rename one of the two", line
            )
        line_of_name[name] = line
        letters = row.translate(None, _BLANKS).decode().upper()
        if not letters:
            raise FileFormatError(path, f"sequence '{name}' is empty; add its residues or remove its header", line)
        sequences.append(ProteinSequence(name=name, letters=letters, description="".join(description).strip()))
    return sequences


def parse_a3m(path: str | Path, data: bytes | None = None) -> Alignment:
    """An A3M alignment: upper case and '-' are match columns, lower case is inserted between them.

    `data`: the file's bytes, if they were read already (from an alignment database); `path` then names them in messages.
    Lines before the first header that start with '#' are comments.

    Raises FileFormatError (file and line) for an illegal character, a row whose number of match columns differs from the
    first row's, and a header without sequence (a truncated file).
    """
    records = _split_records(path, _text(path, data), "an A3M")
    codes = _translate(records, _A3M, "remove it (X stands for an unknown residue)")
    match = codes <= GAP
    row_starts = np.concatenate(([0], np.cumsum([len(row) for row in records.rows])))
    widths = np.diff(np.concatenate(([0], np.cumsum(match)))[row_starts])
    names = records.names()
    if (differs := np.flatnonzero((widths != widths[0]) | (widths == 0))).size:
        row = int(differs[0])
        found = (
            f"sequence '{names[row]}' has {widths[row]} match columns, the first sequence '{names[0]}' has {widths[0]}"
        )
        truncated = row == len(names) - 1 and widths[row] < max(widths[0], 1)
        mend = "the file looks truncated: write it again" if truncated else "mend the row or remove it"
        raise FileFormatError(path, f"{found}; {mend}", records.header_lines[row])

    shape = (len(names), int(widths[0]))
    residues = codes[match].view(np.int8).reshape(shape)
    inserts = codes == _INSERT
    if not inserts.any():
        return Alignment(str(path), names, residues, np.zeros(shape, np.int32))
    # Insertions before each match column of a row = difference of their running count; the row's start is its zero.
    running = np.concatenate((np.zeros(1, np.int32), np.cumsum(inserts, dtype=np.int32)))
    at_matches = running[:-1][match].reshape(shape)
    deletions = np.diff(at_matches, axis=1, prepend=running[row_starts[:-1], None])
    return Alignment(str(path), names, residues, deletions)


def parse_stockholm(path: str | Path, data: bytes | None = None) -> Alignment:
    """A Stockholm alignment (one block or interleaved ones) as columns of its first sequence, the query.

    Columns where the query has a gap are dropped; residues in them count as deletions before the next kept column, as in AF2.
    '#=GF', '#=GS', '#=GC' and '#=GR' lines are skipped. `data` as in `parse_a3m`.

    Raises FileFormatError (file and line) for a missing '# STOCKHOLM' header or '//' (a truncated file), rows of unequal
    length, an illegal character, a query of gaps only.
    """
    lines = _text(path, data).splitlines()
    rows: dict[bytes, list[bytes]] = {}
    line_of_row: dict[bytes, int] = {}
    end = _stockholm_end(path, lines)
    for number, line in enumerate(islice(lines, end), 1):
        if line[:1] == b"#" or not (words := line.split()):
            continue
        if len(words) != 2:
            raise FileFormatError(path, f"expected 'name residues', found {len(words)} words; mend the line", number)
        name, chunk = words
        if name in rows:
            rows[name].append(chunk)
        else:
            rows[name], line_of_row[name] = [chunk], number
    if not rows:
        raise FileFormatError(path, "no sequences in the alignment; remove the file or run the search again")

    joined = [chunks[0] if len(chunks) == 1 else b"".join(chunks) for chunks in rows.values()]
    names, numbers = tuple(name.decode() for name in rows), list(line_of_row.values())
    width = len(joined[0])
    if row := next((k for k, chunk in enumerate(joined) if len(chunk) != width), None):
        raise FileFormatError(
            path,
            f"sequence '{names[row]}' has {len(joined[row])} columns, the first sequence '{names[0]}' has {width}; "
            f"mend the row or remove it",
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


def _deletions_of_dropped(codes: UInt8[np.ndarray, "N W"], kept: Bool[np.ndarray, " W"]) -> Int32[np.ndarray, "N L"]:
    """Residues in dropped columns, counted at the next kept column."""
    deletions = np.zeros((len(codes), int(kept.sum())), np.int32)
    dropped = np.flatnonzero(~kept)
    column = np.cumsum(kept)[dropped]  # index of the kept column that follows each dropped one
    dropped, column = dropped[column < deletions.shape[1]], column[column < deletions.shape[1]]
    if dropped.size:
        first = np.flatnonzero(np.diff(column, prepend=-1))
        # Transposed, a run of dropped columns is a run of whole rows, which `reduceat` adds at memory speed.
        counts = np.add.reduceat((codes.T[dropped] != GAP).view(np.int8), first, axis=0, dtype=np.int32)
        deletions[:, column[first]] = counts.T
    return deletions


def _stockholm_end(path: str | Path, lines: list[bytes]) -> int:
    """Index of the '//' line, after checks of the file's frame."""
    first = next((k for k, line in enumerate(lines) if line.strip()), 0)
    if not lines[first].startswith(b"# STOCKHOLM"):
        raise FileFormatError(path, "not a Stockholm file: its first line must be '# STOCKHOLM 1.0'", first + 1)
    end = next((k for k, line in enumerate(lines) if line.rstrip() == b"//"), None)
    if end is None:
        raise FileFormatError(path, "no '//' at the end: the file is truncated; write it again", len(lines))
    more = next((k for k in range(end + 1, len(lines)) if lines[k].strip()), None)
    if more is not None:
        raise FileFormatError(path, "text after '//': keep one alignment a file and split the others off", more + 1)
    return end


@dataclass(frozen=True)
class _Records:
    """The records of a FASTA-like file. `header_lines` count from 1; a record's sequence follows on the next lines."""

    path: str | Path
    headers: list[str]
    header_lines: list[int]
    bodies: list[list[bytes]]  # the sequence lines of each record
    rows: list[bytes]  # the same, joined

    def names(self) -> tuple[str, ...]:
        """The first word of every header."""
        return tuple((header.split(maxsplit=1) or [""])[0] for header in self.headers)


def _split_records(path: str | Path, data: bytes, kind: str) -> _Records:
    lines = data.splitlines()
    starts = [k for k, line in enumerate(lines) if line[:1] == b">"]
    for number, line in enumerate(islice(lines, starts[0] if starts else None), 1):
        if line.strip() and not line.startswith(b"#"):
            raise FileFormatError(path, f"not {kind} file: expected a header that starts with '>'; add '>name'", number)
    if not starts:
        raise FileFormatError(path, f"not {kind} file: no header that starts with '>'; write it again")
    headers = b"\n".join([lines[k][1:] for k in starts]).decode().split("\n")
    bodies = [lines[start + 1 : end] for start, end in pairwise([*starts, len(lines)])]
    rows = [body[0] if len(body) == 1 else b"".join(body) for body in bodies]
    return _Records(path, headers, [start + 1 for start in starts], bodies, rows)


def _translate(records: _Records, table: bytes, mend: str) -> UInt8[np.ndarray, " n"]:
    """Codes of all rows joined; raises FileFormatError at the first illegal byte."""
    joined = b"".join(records.rows).translate(table)
    if (at := joined.find(_ILLEGAL)) >= 0:
        row, offset = _locate(records.rows, at)
        index, offset = _locate(records.bodies[row], offset)
        letter = records.bodies[row][index][offset:].decode(errors="replace")[0]
        line = records.header_lines[row] + 1 + index
        raise FileFormatError(
            records.path, f"illegal letter {letter!r} in sequence '{records.names()[row]}'; {mend}", line
        )
    return np.frombuffer(joined, np.uint8)


def _locate(parts: list[bytes], offset: int) -> tuple[int, int]:
    """(part, offset within it) of an offset in all parts joined."""
    ends = np.cumsum([len(part) for part in parts])
    part = int(np.searchsorted(ends, offset, side="right"))
    return part, offset - int(ends[part]) + len(parts[part])


def _check_name(path: str | Path, name: str, line: int) -> None:
    """Names of FASTA records become folders."""
    if not name:
        raise FileFormatError(path, "a header without a name; write '>name'", line)
    if found := _UNFIT_FOR_FILES.search(name):
        mend = "use letters, digits, '_', '-' and '.'"
        message = f"the name '{name}' cannot name a folder because of its '{found.group()}'; {mend}"
        raise FileFormatError(path, message, line)
    if len(name.encode()) > _LONGEST_NAME:
        raise FileFormatError(path, f"a name of {len(name)} characters cannot name a folder; shorten it", line)


def _text(path: str | Path, data: bytes | None) -> bytes:
    return read_bytes(path) if data is None else check_text(path, unpack(path, data))
