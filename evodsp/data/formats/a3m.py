"""A3M alignments, with boolean masks over the whole file instead of a loop over characters."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evodsp.data.formats.bytes_to_codes import BLANK_CODES, BLANKS, INSERTION, SKIPPED, byte_table
from evodsp.data.formats.fasta import SUBSTITUTES, sizes_of_complex, split_records, translate
from evodsp.data.records import Alignment
from evodsp.errors import FileFormatError
from evodsp.geometry.alphabet import ALIGNMENT_CODES, GAP, RESTYPES_WITH_X
from evodsp.reading.text_files import text_of

# A dot is padding opposite another row's insertion, an asterisk the end of translation: neither stands for a residue.
_A3M = byte_table(
    ALIGNMENT_CODES
    | dict.fromkeys(map(str.lower, ALIGNMENT_CODES), INSERTION)
    | {"-": GAP, ".": SKIPPED, "*": SKIPPED}
    | BLANK_CODES
)

_BESIDE_COLUMNS = bytes(range(ord("a"), ord("z") + 1)) + b".*"


def parse_a3m(path: str | Path, data: bytes | None = None) -> Alignment:
    """An A3M alignment: upper case and '-' are match columns, lower case is inserted between them.

    `data`: the file's bytes, if they were read already (from an alignment database); `path` then names them in messages.
    Lines before the first header that start with '#' are comments. HH-suite's records of secondary structure (`ss_pred`,
    `ss_conf`, `ss_dssp`) are skipped, and so is a `*` (end of translation).

    Raises FileFormatError (file and line) for an illegal character, a row whose number of match columns differs from the
    first row's, and a header without sequence (a truncated file).
    """
    records = split_records(path, text_of(path, data), "an A3M").without("ss_")
    codes = translate(records, _A3M, "remove it (X stands for an unknown residue)")
    match = codes <= GAP
    row_starts = np.concatenate(([0], np.cumsum([len(row) for row in records.rows])))
    widths = np.diff(np.concatenate(([0], np.cumsum(match)))[row_starts])
    names = records.names()
    if (differs := np.flatnonzero((widths != widths[0]) | (widths == 0))).size:
        row = int(differs[0])
        found = (
            f"sequence '{names[row]}' has {widths[row]} match columns, the first sequence '{names[0]}' has {widths[0]}"
        )
        if row == 0:  # no upper-case letter and no gap
            raise FileFormatError(
                path,
                f"the first sequence '{names[0]}' has no upper-case residue (lower case is insertions); write it in upper case",
                records.header_lines[0],
            )
        truncated = row == len(names) - 1 and widths[row] < max(widths[0], 1)
        fix = "the file looks truncated: write it again" if truncated else "correct the row or remove it"
        raise FileFormatError(path, f"{found}; {fix}", records.header_lines[row])

    shape = (len(names), int(widths[0]))
    residues = codes[match].view(np.int8).reshape(shape)
    inserted = codes == INSERTION
    if not inserted.any():
        return Alignment(str(path), names, residues, np.zeros(shape, np.int32))
    # Insertions before each match column are differences of their running count, which starts anew in each row.
    running = np.concatenate((np.zeros(1, np.int32), np.cumsum(inserted, dtype=np.int32)))
    at_matches = running[:-1][match].reshape(shape)
    deletions = np.diff(at_matches, axis=1, prepend=running[row_starts[:-1], None])
    return Alignment(str(path), names, residues, deletions)


def name_if_a3m(data: bytes) -> str | None:
    """The name of the first sequence if text that no file's name describes is A3M; None if it is FASTA, or neither.

    It is A3M if it is ColabFold's alignment of a complex, or if most rows have as many columns as the first, and there are gaps
    or insertions, which FASTA has not.
    """
    try:
        text = text_of("", data)
        first, _, rest = text.partition(b"\n")
        if sizes_of_complex("", first):
            return split_records("", rest, "an A3M").without("ss_").names()[0]
        records = split_records("", text, "an A3M").without("ss_")
    except FileFormatError:
        return None
    rows = [row.translate(None, BLANKS) for row in records.rows]
    columns = [row.translate(None, _BESIDE_COLUMNS) for row in rows]
    aligned = sum(len(row) == len(columns[0]) for row in columns) > len(rows) // 2
    marked = any(b"-" in row or row != columns[k] for k, row in enumerate(rows[1:], 1))
    return records.names()[0] if columns[0] and aligned and marked else None


def query_of_a3m(path: Path, data: bytes | None = None) -> tuple[str, bool]:
    """The first sequence of an A3M file, and whether letters of it were replaced (B, J, O, U, Z, as in every alignment).

    `data`: the file's bytes, if they were read already; `path` then names them in messages.

    Raises UserError if the file cannot be read, FileFormatError if it is no A3M, or its first sequence is empty, has gaps or
    insertions (lower case), or has illegal letters. The other sequences are not looked at.
    """
    query = split_records(path, text_of(path, data), "an A3M").without("ss_").only(0)
    codes = translate(query, _A3M, "remove it (X stands for an unknown residue)")
    for code, what in ((GAP, "a gap"), (INSERTION, "lower case, which is an insertion")):
        if (codes == code).any():
            fix = "write all of its residues, in upper case"
            message = f"the first sequence has {what}, but it is the query of the prediction; {fix}"
            raise FileFormatError(path, message, query.header_lines[0])
    letters = "".join(RESTYPES_WITH_X[code] for code in codes[codes != SKIPPED])
    if not letters:
        raise FileFormatError(path, "the first sequence is empty; write the query there", query.header_lines[0])
    return letters, any(letter.encode() in query.rows[0] for letter in SUBSTITUTES)
