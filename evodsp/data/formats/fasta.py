"""FASTA files, and the records ('>header', then lines of residues) that A3M files consist of too.

A text is split into lines once; the residues of all records are joined and translated together. An A3M file may be large, so
it comes in pieces.

Tables of sequences, as ColabFold takes them: CSV files with the columns `id` and `sequence`, in any order.

Cells are separated by commas, or by semicolons or tabs, as spreadsheets of some countries write them.

Residue letters to codes, for whole files at once: one 256-entry table for `bytes.translate` in place of a character loop.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from evodsp.data.records import ProteinSequence
from evodsp.errors import FileFormatError
from evodsp.geometry.residues import ALIGNMENT_CODES, RESTYPE_1TO3, RESTYPES_WITH_X, monomer_letter
from evodsp.printing import quoted
from evodsp.reading.text_files import text_of

INSERTION, SKIPPED, ILLEGAL = 100, 101, 102
"""Entries of a table that are no residue codes: an inserted residue, a character without meaning, a forbidden one."""
BLANKS = b" \t\v\f"
BLANK_CODES: dict[str, int] = dict.fromkeys(BLANKS.decode(), SKIPPED)
EITHER_CASE: dict[str, int] = ALIGNMENT_CODES | {letter.lower(): code for letter, code in ALIGNMENT_CODES.items()}


def byte_table(codes: dict[str, int]) -> bytes:
    """A table for `bytes.translate`: `codes` for the given characters, `ILLEGAL` for all others."""
    table = bytearray([ILLEGAL] * 256)
    for letter, code in codes.items():
        table[ord(letter)] = code
    return bytes(table)


_LETTERS = {c: k for c, k in EITHER_CASE.items() if c.upper() not in "BJOUZ"} | BLANK_CODES
_BETWEEN_CHAINS = ":"
_FASTA, _FASTA_OF_CHAINS = byte_table(_LETTERS), byte_table(_LETTERS | {_BETWEEN_CHAINS: 0})
SUBSTITUTES: dict[str, str] = {letter: RESTYPES_WITH_X[ALIGNMENT_CODES[letter]] for letter in "BJOUZ"}
"""The replacements of letters that are no amino acid in a query: the same as in alignments, so that both agree."""
_REPLACE = "write X, or the amino acid it stands for (U: C, O: K, B: D or N, Z: E or Q, J: I or L)"
_REPLACED = "a sequence has letters only, one for each residue; write X for an unknown one"
"""Advice about an illegal letter; the second where letters that are no amino acid are replaced, so it is none of them."""
_STOP = b"*"
_LISTED = rb"(\d{1,9}(?:[ \t]*,[ \t]*\d{1,9})*)"
_COPIES = re.compile(rb"[ \t]*#[ \t]*" + _LISTED + rb"[ \t]+" + _LISTED + rb"\s*$")
"""ColabFold's first line of an alignment: the lengths of the chains, and the number of copies of each. People write it by hand,
with blanks."""
_NUMBERS = re.compile(rb"[ \t]*#[ \t]*\d+[ \t,;:|]+\d[\d \t,;:|]*$")
"""A line of comment that lists numbers, and nothing else: meant as ColabFold's first line."""
_STRUCTURE = re.compile(
    rb"data_|loop_|_entry\.|(HEADER|OBSLTE|TITLE|COMPND|SOURCE|EXPDTA|AUTHOR|REMARK|SEQRES|CRYST1|MODEL|ATOM|HETATM|PARENT)\b"
)
"""Beginnings of the lines of an mmCIF or a PDB file."""
_THREE_LETTERS = frozenset(RESTYPE_1TO3.values())
_UNFIT_FOR_FILES = re.compile(r'[/\\:*?"<>]|^[.-]')
_LONGEST_NAME = 200


@dataclass(frozen=True)
class FastaRecord:
    """A record of a FASTA file: its sequence, or the error in it."""

    name: str
    line: int
    """The line of its header, from 1."""
    sequence: ProteinSequence | FileFormatError
    substituted: bool
    """Whether letters had to be replaced or left out."""
    chains: tuple[str, ...] = ()
    """The letters of each chain of a complex, which the sequence joins; () for a single chain."""


def parse_fasta(path: str | Path) -> list[ProteinSequence]:
    """The sequences of a FASTA file, in the file's order. Letters: the 20 amino acids and X, either case.

    Names (the first word of a header) become names of folders, so they must be valid file names and differ from one another.

    Raises FileFormatError (file and line) for residues before the first header, a header without sequence, an illegal letter,
    and a name that is missing, repeated or not a valid file name.
    """
    sequences = []
    for record in read_fasta(path):
        if isinstance(record.sequence, FileFormatError):
            raise record.sequence
        sequences.append(record.sequence)
    return sequences


def read_fasta(
    path: str | Path, substitute: bool = False, data: bytes | None = None, several: bool = False
) -> list[FastaRecord]:
    """Like `parse_fasta`, but a broken record has its error in the place of its sequence.

    `substitute`: the letters of `SUBSTITUTES` are replaced, and a '*' at the end, which stands for a stop codon, is left out.
    `data`: the file's bytes, if they were read already; `path` then names them in messages. `several`: whether a record may
    have several chains, with ':' between them.

    Raises FileFormatError for a file that is not FASTA.
    """
    (records,) = record_pieces(path, [text_of(path, data)], "a FASTA")
    found: list[FastaRecord] = []
    line_of_name: dict[str, int] = {}
    for index, name in enumerate(records.names()):
        given = records.only(index)
        found.append(read_record(given, name, given.header_lines[0], line_of_name, substitute, several))
    return found


def read_record(
    given: Records, name: str, line: int, line_of_name: dict[str, int], substitute: bool, several: bool
) -> FastaRecord:
    """A single record, or its error. `line`: the place of its name. `line_of_name`: the names in use, with their lines. The
    others are as in `read_fasta`."""
    record = _substituted(given) if substitute else given
    sequence: ProteinSequence | FileFormatError
    chains: tuple[str, ...] = ()
    try:
        sequence, chains = _sequence(record, name, line, line_of_name, substitute, several)
    except FileFormatError as error:
        sequence = error
    return FastaRecord(name, line, sequence, record.bodies != given.bodies, chains)


def _substituted(record: Records) -> Records:
    both = SUBSTITUTES | {letter.lower(): instead for letter, instead in SUBSTITUTES.items()}
    table = bytes.maketrans("".join(both).encode(), "".join(both.values()).encode())
    body = [line.translate(table) for line in record.bodies[0]]
    if body and body[-1].rstrip().endswith(_STOP):
        body[-1] = body[-1].rstrip().removesuffix(_STOP)
    return Records(record.path, record.headers, record.header_lines, [body], [b"".join(body)])


def _sequence(
    record: Records, name: str, line: int, line_of_name: dict[str, int], substitute: bool, several: bool
) -> tuple[ProteinSequence, tuple[str, ...]]:
    """The sequence of a single record, and the letters of its chains if it has several."""
    path, row = record.path, record.rows[0]
    check_name(path, name, line)
    if name in line_of_name:
        first = line_of_name[name]
        raise FileFormatError(path, f"the name '{name}' was used on line {first} already; rename one of the two", line)
    line_of_name[name] = line
    _refuse_three_letters(record, name, line)
    table = _FASTA_OF_CHAINS if several else _FASTA
    translate(record, table, _REPLACED if substitute else _REPLACE)
    letters = row.translate(None, BLANKS).decode().upper()
    if not letters:
        raise FileFormatError(path, f"sequence '{name}' is empty; add its residues or remove its header", line)
    description = record.headers[0].strip()[len(name) :].strip()
    chains = tuple(letters.split(_BETWEEN_CHAINS))
    if "" in chains:
        empty = chains.index("") + 1
        message = f"chain {empty} of '{name}' is empty; write its residues, or remove a '{_BETWEEN_CHAINS}'"
        raise FileFormatError(path, message, line)
    return ProteinSequence(name=name, letters="".join(chains), description=description), chains if chains[1:] else ()


def _refuse_three_letters(record: Records, name: str, line: int) -> None:
    """Raise FileFormatError for residues such as 'ALA GLY SER', each of which would be read as three."""
    for letters in b" ".join(record.bodies[0]).decode(errors="replace").upper().split(_BETWEEN_CHAINS):
        words = re.split(r"[\s-]+", letters.strip("- \t"))
        least = (len(words) + 1) // 2  # others are modified residues
        if len(words) == 1:  # by chance, six different codes would not follow one another
            words = re.findall(".{1,3}", letters.strip())
            least = len(words) if len(set(words)) > 5 else len(words) + 1
        if len(words) > 1 and all(len(w) == 3 for w in words) and sum(w in _THREE_LETTERS for w in words) >= least:
            given, meant = quoted(" ".join(words), 20), quoted("".join(map(monomer_letter, words)), 40)
            message = (
                f"sequence '{name}' has codes of three letters ({given}); write one letter for each residue: {meant}"
            )
            raise FileFormatError(record.path, message, line)


@dataclass(frozen=True)
class Records:
    """The records of a FASTA or A3M file, or of a piece of it. `header_lines` count from 1; a record's residues follow on the
    next lines."""

    path: str | Path
    headers: list[str]
    header_lines: list[int]
    bodies: list[list[bytes]]
    """The residue lines of each record."""
    rows: list[bytes]
    """The joined residue lines of each record."""
    earlier: tuple[int, int] | None = None
    """If the first record began in an earlier piece: the lines between its header and this piece, and the letters on them."""

    def names(self) -> tuple[str, ...]:
        """The first word of every header."""
        return tuple((header.split(maxsplit=1) or [""])[0] for header in self.headers)

    def only(self, index: int) -> Records:
        """A single record."""
        return self._chosen([index])

    def without(self, prefix: str) -> Records:
        """The records whose headers do not begin with `prefix`."""
        kept = [k for k, header in enumerate(self.headers) if not header.startswith(prefix)]
        return self if len(kept) == len(self.headers) else self._chosen(kept)

    def _chosen(self, kept: list[int]) -> Records:
        return Records(
            self.path,
            [self.headers[k] for k in kept],
            [self.header_lines[k] for k in kept],
            [self.bodies[k] for k in kept],
            [self.rows[k] for k in kept],
            self.earlier if kept[:1] == [0] else None,
        )


def record_pieces(path: str | Path, blocks: Iterable[bytes], kind: str) -> Iterator[Records]:
    """The records of a text that comes in blocks, in pieces. `kind` ('a FASTA') names the format in messages. Lines before the
    first header may be comments.

    Raises FileFormatError for text before the first header, for a file without headers, and for ColabFold's alignment of a
    complex, which begins with a line '#lengths copies'.
    """
    header, header_line, letters = "", 0, 0
    for number, lines in _lines_of(path, blocks):
        starts = [k for k, line in enumerate(lines) if line[:1] == b">"]
        if not header_line:
            for place, line in enumerate(islice(lines, starts[0] if starts else None), number):
                if sizes := sizes_of_complex(path, line, place):
                    _refuse_complex(path, *sizes)
                if line.strip() and not line.startswith(b"#"):
                    if _STRUCTURE.match(line):
                        fix = "write the sequence of each of its chains as FASTA: '>name', then letters"
                        raise FileFormatError(path, f"a structure, not {kind} file; {fix}", place)
                    message = f"not {kind} file: expected a header that starts with '>'; add '>name'"
                    raise FileFormatError(path, message, place)
            if not starts:
                continue
        headers = [lines[k][1:].decode() for k in starts]
        header_lines = [number + k for k in starts]
        bodies = [lines[start + 1 : end] for start, end in pairwise([*starts, len(lines)])]
        goes_on = header_line > 0 and starts[:1] != [0]
        if goes_on:
            headers, header_lines = [header, *headers], [header_line, *header_lines]
            bodies.insert(0, lines[: starts[0] if starts else None])
        rows = [body[0] if len(body) == 1 else b"".join(body) for body in bodies]
        earlier = (number - header_line - 1, letters) if goes_on else None
        yield Records(path, headers, header_lines, bodies, rows, earlier)
        header, header_line = headers[-1], header_lines[-1]
        letters = len(rows[-1].translate(None, BLANKS)) + (0 if starts else letters)
    if not header_line:
        raise FileFormatError(path, f"not {kind} file: no header that starts with '>'; write it again")


def _lines_of(path: str | Path, blocks: Iterable[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """The lines of a text that comes in blocks, and the number of the first of them. A long line comes in parts."""
    number, rest, longest = 1, b"", 0
    for block, following in pairwise(chain(blocks, [None])):
        assert block is not None
        text, longest = rest + block, max(longest, len(block))
        lines = text.splitlines()
        rest = b""
        if following is not None and text and (text[-1:] != b"\n"):  # behind '\r', a '\n' may follow
            rest = lines.pop() + (b"\r" if text[-1:] == b"\r" else b"")
        parts = len(lines)
        if len(rest) > longest:
            if rest[:1] == b">":
                line = number + len(lines)
                raise FileFormatError(path, f"a header of more than {longest:,} characters; shorten it", line)
            # The rest of the line must not look like a header.
            if rest[-1:] not in b">\r":
                lines.append(rest[:-1])
                rest = rest[-1:]
        if lines:
            yield number, lines
        number += parts


def sizes_of_complex(path: str | Path, line: bytes, number: int = 1) -> tuple[list[int], list[int]] | None:
    """The lengths and the copies that the first line of ColabFold's alignment of a complex lists; None if this line is none, or
    that of one chain, once. Raises FileFormatError for a line that is almost one, or that does not stand first."""
    found = _COPIES.match(line)
    if (found or _NUMBERS.match(line)) and (found is None or number > 1):
        fix = "one line, the first of the file: '#32,32', a tab, '1,1' for two chains of 32 residues, or none for one chain"
        said = quoted(line.strip(), 30)
        raise FileFormatError(
            path, f"'{said}' may be ColabFold's line of lengths and copies; write that as {fix}", number
        )
    if not found:
        return None
    lengths, copies = ([int(number) for number in field.split(b",")] for field in found.groups())
    return None if len(lengths) == 1 and copies == [1] else (lengths, copies)


def _refuse_complex(path: str | Path, lengths: list[int], copies: list[int]) -> None:
    if len(lengths) == 1:
        what, fix = f"{copies[0]} copies of a chain", "remove the line to have one copy"
    else:
        what, fix = f"{len(lengths)} chains in one row", "give the alignment of each chain"
    raise FileFormatError(
        path,
        f"ColabFold's alignment of a complex: its first line says {what} (lengths {', '.join(map(str, lengths[:5]))}; copies "
        f"{', '.join(map(str, copies[:5]))}), but this is to be one chain's; {fix} (evodsp predict takes the file as an input)",
        1,
    )


def translate(records: Records, table: bytes, fix: str) -> UInt8[np.ndarray, " n"]:
    """Codes of all rows, joined. Raises FileFormatError at the first illegal byte; `fix` says what to do about it."""
    joined = b"".join(records.rows).translate(table)
    if (at := joined.find(ILLEGAL)) >= 0:
        row, offset = _locate(records.rows, at)
        lines, letters = (row == 0 and records.earlier) or (0, 0)
        position = letters + len(records.rows[row][:offset].translate(None, BLANKS)) + 1
        index, offset = _locate(records.bodies[row], offset)
        letter = records.bodies[row][index][offset:].decode(errors="replace")[0]
        line = records.header_lines[row] + 1 + lines + index
        if letter == _BETWEEN_CHAINS:
            raise FileFormatError(
                records.path,
                f"sequence '{records.names()[row]}' has '{letter}', which separates the chains of a complex, but a "
                "sequence here is one chain; give each chain as a sequence of its own",
                line,
            )
        raise FileFormatError(
            records.path,
            f"illegal letter {letter!r} at position {position} of sequence '{records.names()[row]}'; {fix}",
            line,
        )
    return np.frombuffer(joined, np.uint8)


def _locate(parts: list[bytes], offset: int) -> tuple[int, int]:
    """(part, offset in that part) of an offset in all parts joined."""
    ends = np.cumsum([len(part) for part in parts])
    part = int(np.searchsorted(ends, offset, side="right"))
    return part, offset - int(ends[part]) + len(parts[part])


def check_name(path: str | Path, name: str, line: int | None = None) -> None:
    """Raise FileFormatError unless the record's name can name a folder. `path`, `line`: the place of the record."""
    if not name:
        raise FileFormatError(path, "a header without a name; write '>name'", line)
    fix = "use letters, digits, '_', '-' and '.', and begin with a letter or a digit"
    if not name.isprintable():
        raise FileFormatError(path, f"the name {name!a} has letters that cannot be seen; {fix}", line)
    if found := _UNFIT_FOR_FILES.search(name):
        where = "begins with" if found.start() == 0 else "has"
        message = f"the name '{name}' {where} '{found.group()}', so it cannot name a folder; {fix}"
        raise FileFormatError(path, message, line)
    if len(name.encode()) > _LONGEST_NAME:
        raise FileFormatError(path, f"a name of {len(name)} characters cannot name a folder; shorten it", line)


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
    """Separator of the cells: the first that makes both columns of the first line, or else a comma."""
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
