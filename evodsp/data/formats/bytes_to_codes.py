"""Residue letters to codes, for whole files at once: one 256-entry table for `bytes.translate` in place of a character loop."""

from __future__ import annotations

from evodsp.geometry.residues import ALIGNMENT_CODES

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
