"""Alignments of one text file each: A3M, with boolean masks over a block of the file instead of a loop over characters, and
Stockholm, as jackhmmer writes it.

ColabFold's alignment of a complex is an A3M file whose rows have the columns of all its distinct sequences side by side.

#10,12<TAB>1,2           the lengths of the distinct sequences, and the copies of each
>101<TAB>102
QUERYONEXXQUERYTWOXXXX
>a paired row            residues of several sequences
>an unpaired row         residues of one sequence, gaps in the columns of the others
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32, Integer, UInt8

from evodsp.data.formats.fasta import (
    BLANK_CODES,
    BLANKS,
    EITHER_CASE,
    INSERTION,
    SKIPPED,
    SUBSTITUTES,
    Records,
    byte_table,
    record_pieces,
    sizes_of_complex,
    translate,
)
from evodsp.data.records import Alignment, RowNames
from evodsp.errors import FileFormatError
from evodsp.geometry.residues import ALIGNMENT_CODES, GAP, RESTYPES_WITH_X
from evodsp.reading.text_files import BLOCK, text_blocks, text_of

# A dot is padding opposite another row's insertion, an asterisk the end of translation: neither stands for a residue.
_A3M = byte_table(
    ALIGNMENT_CODES
    | dict.fromkeys(map(str.lower, ALIGNMENT_CODES), INSERTION)
    | {"-": GAP, ".": SKIPPED, "*": SKIPPED}
    | BLANK_CODES
)
_FIX = "remove it (X stands for an unknown residue)"
_BESIDE_COLUMNS = bytes(range(ord("a"), ord("z") + 1)) + b".*"
_BYTE, _LONGEST = 255, 65_535
"""The most insertions that a byte holds, and that two hold. The longest proteins have 45,000 residues."""


def parse_a3m(path: str | Path, data: bytes | None = None) -> Alignment:
    """An A3M alignment: upper case and '-' are match columns, lower case is inserted between them.

    `data`: the file's bytes, if they were read already (from an alignment database); `path` then names them in messages.
    Lines before the first header that start with '#' are comments. HH-suite's records of secondary structure (`ss_pred`,
    `ss_conf`, `ss_dssp`) are skipped, and so is a `*` (end of translation). A file is read in blocks: at the peak it takes 2
    bytes of memory for each column of each row, or 3 if there is an insertion of more than 255 residues, and the names.

    Raises FileFormatError (file and line) for an illegal character, a row whose number of match columns differs from the
    first row's, a header without sequence (a truncated file), and an insertion that is longer than any protein.
    """
    return parse_blocks(path, text_blocks(path, data))


def parse_blocks(path: str | Path, blocks: Iterator[bytes]) -> Alignment:
    """`parse_a3m` of a text that comes in blocks."""
    rows = _Rows(path)
    with _to_the_end(blocks):
        for piece in _pieces(path, blocks):
            rows.add(piece, translate(piece, _A3M, _FIX))
    return rows.alignment()


def query_of_a3m(path: str | Path, blocks: Iterator[bytes]) -> tuple[str, bool]:
    """The first sequence of an A3M file, and whether letters of it were replaced (B, J, O, U, Z, as in every alignment).

    `blocks`: the file's text. Raises FileFormatError if it is no A3M, or its first sequence is empty, has gaps or insertions
    (lower case), or has illegal letters. The other sequences are not looked at.
    """
    codes, line, replaced = b"", 0, False
    with _to_the_end(blocks):
        for piece in _pieces(path, blocks):
            if line and piece.earlier is None:
                break
            query, line = piece.only(0), piece.header_lines[0]
            codes += translate(query, _A3M, _FIX).tobytes()
            replaced = replaced or any(letter.encode() in query.rows[0] for letter in SUBSTITUTES)
            if len(piece.rows) > 1:
                break
    for code, what in ((GAP, "a gap"), (INSERTION, "lower case, which is an insertion")):
        if code in codes:
            fix = "write all of its residues, in upper case"
            message = f"the first sequence has {what}, but it is the query of the prediction; {fix}"
            raise FileFormatError(path, message, line)
    letters = "".join(RESTYPES_WITH_X[code] for code in codes if code != SKIPPED)
    if not letters:
        raise FileFormatError(path, "the first sequence is empty; write the query there", line)
    return letters, replaced


def name_if_a3m(data: bytes) -> str | None:
    """The name of the first sequence if text that no file's name describes is A3M; None if it is FASTA, or neither.

    It is A3M if it is ColabFold's alignment of a complex, or if most rows have as many columns as the first, and there are gaps
    or insertions, which FASTA has not. The first block of the text decides.
    """
    blocks = text_blocks("", data)
    try:
        first, end, rest = next(blocks).partition(b"\n")
        if sizes_of_complex("", first):
            return next(_pieces("", [rest])).names()[0]
        records = next(_pieces("", [first + end + rest]))
        is_whole = next(blocks, None) is None
    except (FileFormatError, StopIteration):
        return None
    rows = [row.translate(None, BLANKS) for row in records.rows]
    if not is_whole and len(rows) > 1:
        del rows[-1]
    columns = [row.translate(None, _BESIDE_COLUMNS) for row in rows]
    aligned = sum(len(row) == len(columns[0]) for row in columns) > len(rows) // 2
    marked = any(b"-" in row or row != columns[k] for k, row in enumerate(rows[1:], 1))
    return records.names()[0] if columns[0] and aligned and marked else None


def _pieces(path: str | Path, blocks: Iterable[bytes]) -> Iterator[Records]:
    """The records, without those of secondary structure unless there are no others."""
    skipped: list[Records] | None = []
    for piece in record_pieces(path, blocks, "an A3M"):
        if (kept := piece.without("ss_")).headers:
            skipped = None
            yield kept
        elif skipped is not None:
            skipped.append(piece)
    yield from skipped or ()


@contextmanager
def _to_the_end(blocks: Iterator[bytes]) -> Iterator[None]:
    """Reads the blocks that are left: a broken archive, or text that is none, says more than what else is wrong."""
    try:
        yield
    except FileFormatError:
        for _ in blocks:
            pass
        raise
    for _ in blocks:
        pass


class _Rows:
    """The rows that were read. Insertions before a column take a byte, and a place in a list where it does not hold them."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._names = path, RowNames()
        self._residues, self._insertions = bytearray(), bytearray()
        self._long: list[tuple[np.ndarray, np.ndarray]] = []  # places and numbers
        self._columns = 0  # of a row; 0 until the first one is whole
        self._last = ("", 0, 0)  # name, line and columns of the row that may go on
        self._behind = 0  # insertions behind its last column

    def add(self, piece: Records, codes: UInt8[np.ndarray, " n"]) -> None:
        """Add a piece with its codes. Raises FileFormatError for a row that does not fit the first one."""
        names, goes_on = piece.names(), piece.earlier is not None
        starts = np.concatenate(([0], np.cumsum([len(row) for row in piece.rows])))
        match = codes <= GAP
        first = _before_each(match)[starts]  # the first column of each row
        widths = np.diff(first)
        # Insertions before each column are differences of their running count, which starts anew in each row.
        inserted = _before_each(codes == INSERTION)
        at_column, at_start, begun = inserted[:-1][match], inserted[starts], np.flatnonzero(widths)
        numbers = np.diff(at_column, prepend=inserted[:1])
        numbers[first[begun]] = at_column[first[begun]] - at_start[begun]
        behind = int(at_start[-1] - (at_column[-1] if widths[-1] else at_start[-2]))
        if goes_on and widths[0]:
            numbers[0] += self._behind
        elif goes_on and len(names) == 1:
            behind += self._behind
        self._behind = behind
        if (long := np.flatnonzero(numbers > _BYTE)).size:
            self._long.append((len(self._residues) + long, numbers[long]))
        if (most := int(numbers.max(initial=0))) > _LONGEST or behind > _LONGEST:
            row = int(np.searchsorted(first, numbers.argmax(), "right")) - 1 if most > _LONGEST else -1
            message = f"sequence '{names[row]}' has more than {_LONGEST:,} insertions in one place, as no protein has"
            raise FileFormatError(self._path, f"{message}; remove it", piece.header_lines[row])
        self._residues += codes[match].data
        self._insertions += np.minimum(numbers, _BYTE).astype(np.uint8).data
        self._check_widths(names, piece.header_lines, widths, goes_on)

    def _check_widths(
        self, names: tuple[str, ...], lines: list[int], widths: Int32[np.ndarray, " n"], goes_on: bool
    ) -> None:
        """Check the rows that are whole now."""
        if goes_on:
            widths[0] += self._last[2]
        elif len(self._names):
            self._check(*self._last)
        self._names.extend(names[goes_on:])
        for row in np.flatnonzero(widths[:-1] != (self._columns or -1)).tolist():
            self._check(names[row], lines[row], int(widths[row]))
        self._last = names[-1], lines[-1], int(widths[-1])

    def _check(self, name: str, line: int, width: int, is_last: bool = False) -> None:
        self._columns = self._columns or width
        if not self._columns:  # no upper-case letter and no gap
            message = f"the first sequence '{name}' has no upper-case residue (lower case is insertions)"
            raise FileFormatError(self._path, f"{message}; write it in upper case", line)
        if width != self._columns:
            found = f"sequence '{name}' has {width} match columns"
            expected = f"the first sequence '{self._names[0]}' has {self._columns}"
            truncated = is_last and width < self._columns
            fix = "the file looks truncated: write it again" if truncated else "correct the row or remove it"
            raise FileFormatError(self._path, f"{found}, {expected}; {fix}", line)

    def alignment(self) -> Alignment:
        """The rows, after the last piece. Raises FileFormatError as `add` does, for the last one."""
        self._check(*self._last, is_last=True)
        shape = (len(self._names), self._columns)
        residues = np.frombuffer(self._residues, np.int8).reshape(shape)
        if not self._long:
            deletions = np.frombuffer(self._insertions, np.uint8)
            return Alignment(str(self._path), self._names, residues, deletions.reshape(shape))
        self._insertions *= 2  # in place; bytes become numbers of two bytes, from the end
        narrow, wide = np.frombuffer(self._insertions, np.uint8), np.frombuffer(self._insertions, np.uint16)
        for end in range(len(wide), 0, -BLOCK):
            block = slice(max(end - BLOCK, 0), end)
            wide[block] = narrow[block].copy()
        for places, numbers in self._long:
            wide[places] = numbers
        return Alignment(str(self._path), self._names, residues, wide.reshape(shape))


def _before_each(marks: Bool[np.ndarray, " n"]) -> Int32[np.ndarray, " m"]:
    """The number of marks before each place, and in all."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(marks, dtype=np.int32)))


@dataclass(frozen=True)
class ComplexQuery:
    """The chains of a complex, as the alignment's first line and first row give them."""

    sequences: tuple[str, ...]
    """The letters of the distinct sequences."""
    copies: tuple[int, ...]
    """The number of chains with each of them, at least 1."""
    substituted: bool
    """Whether letters that are no amino acid were replaced."""


def query_of_complex(path: Path, data: bytes | None = None) -> ComplexQuery | None:
    """The chains of ColabFold's alignment of a complex; None if the A3M file is a single chain's. Only the first row is parsed.

    `data`: the file's bytes, if they were read already; `path` then names them in messages. Raises FileFormatError for a first
    line that does not fit the first row, and as `query_of_a3m` does.
    """
    split = _split(path, data)
    if split is None:
        return None
    lengths, copies, blocks = split
    letters, substituted = query_of_a3m(path, blocks)
    _check_width(path, lengths, len(letters))
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    sequences = tuple(letters[end - length : end] for end, length in zip(ends, lengths, strict=True))
    if repeated := next((place for place, one in enumerate(sequences) if one in sequences[:place]), 0):
        first = sequences.index(sequences[repeated]) + 1
        message = (
            f"sequences {first} and {repeated + 1} of the first row are equal; write one of them, and more copies of it"
        )
        raise FileFormatError(path, message, 1)
    return ComplexQuery(sequences, tuple(copies), substituted)


def parse_complex_a3m(path: str | Path, data: bytes | None = None) -> tuple[Alignment, tuple[int, ...]]:
    """The rows of ColabFold's alignment of a complex, and the lengths of the sequences whose columns stand side by side.

    Raises FileFormatError for a file that is none, and as `query_of_complex` and `parse_a3m` do.
    """
    split = _split(path, data)
    if split is None:
        raise FileFormatError(
            path, "not ColabFold's alignment of a complex, which begins with '#lengths<TAB>copies'", 1
        )
    lengths, _, blocks = split
    alignment = parse_blocks(path, blocks)
    _check_width(path, lengths, alignment.columns)
    return alignment, tuple(lengths)


def _split(path: str | Path, data: bytes | None) -> tuple[list[int], list[int], Iterator[bytes]] | None:
    """Lengths, copies, and the blocks of the file with a comment in place of its first line."""
    blocks = text_blocks(path, data)
    first, _, rest = next(blocks).partition(b"\n")
    sizes = sizes_of_complex(path, first)
    if sizes is None:
        return None
    lengths, copies = sizes
    if len(lengths) != len(copies):
        found = f"{len(lengths)} lengths, but {len(copies)} numbers of copies"
        raise FileFormatError(path, f"its first line has {found}; give one number of copies for each length", 1)
    for what, numbers in (("length", lengths), ("number of copies", copies)):
        if 0 in numbers:
            raise FileFormatError(path, f"its first line has a {what} of 0; leave that sequence out, or correct it", 1)
    return lengths, copies, chain([b"#\n" + rest], blocks)


def _check_width(path: str | Path, lengths: list[int], columns: int) -> None:
    if sum(lengths) != columns:
        listed = " + ".join(map(str, lengths[:5])) + (" + …" if len(lengths) > 5 else "")
        message = (
            f"its first line says {listed} = {sum(lengths)} columns, but its first row has {columns}; correct the line"
        )
        raise FileFormatError(path, message, 1)


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
