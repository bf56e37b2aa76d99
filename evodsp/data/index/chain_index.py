"""The index of a data set: facts about each chain and the places of its files, found once and shared by all processes.

`evodsp data index` makes it (`evodsp.data.index.scan`). It is a folder of columns (`column_folder`). A chain is found by
bisection over the sorted keys. Paths are relative to the alignment and structure folders, so that the data may move.

Formats compared: .npy files are written, checked and mapped by NumPy alone, and any program reads them. An .npz archive
cannot be mapped. Arrow's tables can, but pyarrow is 45 MB more in every environment. SQLite and LMDB look up records,
while filters and weights need whole columns, which they would copy into each process. HDF5 does not map files of several
chunks. OpenFold's caches are JSON: 634,434 chains are over a gigabyte of Python objects in each process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from evodsp.data.index.chain_table import ChainTable, PackedTexts
from evodsp.data.index.column_folder import Format, Index, Source, fitting_parts, within, write_columns
from evodsp.data.sources.alignment_database import StoredFile
from evodsp.data.sources.chain_folder import is_alignment

FORMAT = Format(
    "chains",
    "",
    ("keys", "sequences", "structures", "problems", "file_names", "databases"),
    ("chain_databases", "first_files", "file_name_rows", "file_offsets", "file_lengths"),
)
FOLDER_OF_ITS_OWN = -1
"""Entry of `chain_databases` for a chain whose alignments lie in a folder of their own, or that has none."""
EMPTY_FOLDER = -2
"""Entry of `chain_databases` for a chain whose folder is empty: its sequence is its MSA."""


@dataclass(frozen=True)
class IndexContent:
    """The arrays of an index. Rows are chains, in the order of their keys; n chains have m files."""

    table: ChainTable
    sequences: PackedTexts
    """One-letter codes, '' if unknown."""
    structures: PackedTexts
    """Structure file of each chain's entry, relative to the structure folder; '' if there is none."""
    problems: PackedTexts
    """The reason why a chain's header or first alignment could not be read; '' if it could, or was not needed."""
    databases: PackedTexts
    """Names of OpenFold's databases in the alignment folder."""
    file_names: PackedTexts
    """The distinct names of files, such as `bfd_uniclust_hits.a3m`, relative to the chain's folder."""
    chain_databases: Int32[np.ndarray, " n"]
    """Each chain's row of `databases`, FOLDER_OF_ITS_OWN or EMPTY_FOLDER."""
    first_files: Int64[np.ndarray, " n_plus_1"]
    """The files of row i are those from first_files[i] to first_files[i + 1]."""
    file_name_rows: Int32[np.ndarray, " m"]
    """Each file's row of `file_names`."""
    file_offsets: Int64[np.ndarray, " m"]
    """Each file's first byte in the database; 0 in a folder."""
    file_lengths: Int64[np.ndarray, " m"]
    """Each file's number of bytes."""


class ChainIndex(Index):
    """An open index of chains."""

    FORMAT = FORMAT
    content: IndexContent

    def _take(self, header: Mapping[str, Any], columns: dict[str, Any]) -> None:
        self.content = IndexContent(self.table, **columns)

    def sequence(self, row: int) -> str:
        """The chain's one-letter codes; '' if unknown."""
        return self.content.sequences[row]

    def sequences_of(self, row: int) -> tuple[str, ...]:
        """See `Index`."""
        return tuple(filter(None, [self.sequence(row)]))

    def alignment_files(self, row: int) -> tuple[str, str | None, list[StoredFile]]:
        """The place of a chain's alignments and template searches: (key of the chain that owns them, database or None, files
        sorted by name). Without a database they lie in that key's folder."""
        content, owner = self.content, int(self.table.representatives[row])
        files = slice(int(content.first_files[owner]), int(content.first_files[owner + 1]))
        database = int(content.chain_databases[owner])
        return (
            self.keys[owner],
            None if database < 0 else content.databases[database],
            [
                StoredFile(content.file_names[int(name)], int(offset), int(length))
                for name, offset, length in zip(
                    content.file_name_rows[files], content.file_offsets[files], content.file_lengths[files], strict=True
                )
            ],
        )

    def has_alignments(self) -> Bool[np.ndarray, " n"]:
        """Whether a chain, or an identical one, has alignments, or an empty folder of them."""
        return own_alignments(self.content)[self.table.representatives] | self.are_query_only()

    def are_query_only(self) -> Bool[np.ndarray, " n"]:
        """Whether a chain's sequence is its MSA: its folder is empty, and no identical chain has alignments."""
        has_lender = self.table.representatives != np.arange(len(self))
        return np.asarray(self.content.chain_databases == EMPTY_FOLDER) & ~has_lender

    def has_empty_folder(self, row: int) -> bool:
        """Whether the chain's folder of alignments is empty."""
        return int(self.content.chain_databases[row]) == EMPTY_FOLDER

    def _fitting(self) -> Iterator[tuple[str, bool]]:
        content, files = self.content, len(self.content.file_name_rows)
        yield "sequences", len(content.sequences) == len(self)
        yield "chain_databases", len(content.chain_databases) == len(self)
        yield "chain_databases", within(content.chain_databases, EMPTY_FOLDER, len(content.databases))
        yield "first_files", fitting_parts(content.first_files, len(self), files)
        yield "file_name_rows", within(content.file_name_rows, 0, len(content.file_names))
        for name in ("file_offsets", "file_lengths"):
            column = getattr(content, name)
            yield name, len(column) == files and within(column, 0, np.iinfo(np.int64).max)


def own_alignments(content: IndexContent) -> Bool[np.ndarray, " n"]:
    """Whether each chain has alignments of its own."""
    is_one = np.array([is_alignment(Path(name).name) for name in content.file_names], bool)
    before = np.concatenate([[0], np.cumsum(is_one[content.file_name_rows])])
    return np.asarray(before[content.first_files[1:]] > before[content.first_files[:-1]])


def write_index(path: Path, content: IndexContent, sources: list[Source], obsolete: Mapping[str, str | None]) -> None:
    """Write an index, replacing an earlier one in one step."""
    write_columns(path, FORMAT, content.table, content, sources, {"obsolete": dict(sorted(obsolete.items()))})
