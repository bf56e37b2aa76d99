"""ColabFold's alignment of a complex, an A3M file whose rows have the columns of all its distinct sequences side by side.

#10,12<TAB>1,2           the lengths of the distinct sequences, and the copies of each
>101<TAB>102
QUERYONEXXQUERYTWOXXXX
>a paired row            residues of several sequences
>an unpaired row         residues of one sequence, gaps in the columns of the others
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from evodsp.data.formats.a3m import parse_blocks, query_of_a3m
from evodsp.data.formats.fasta import sizes_of_complex
from evodsp.data.records import Alignment
from evodsp.errors import FileFormatError
from evodsp.reading.text_files import text_blocks


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
