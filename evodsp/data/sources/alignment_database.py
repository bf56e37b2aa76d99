"""OpenFold's alignment databases: `.db` files with the alignments of many chains, and `.index` files that list the place of
each.

An index is JSON: `{chain: {"db": file, "files": [[name, offset, length], …]}}`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from evodsp.data.sources.chain_folder import is_of_a_chain
from evodsp.errors import FileFormatError, UserError
from evodsp.printing import shown
from evodsp.reading.text_files import read_json

UNIFIED_INDEX_NAME = "super.index"
"""OpenFold's index of all databases of a folder."""
_LARGEST_FILE = 1 << 62


class StoredFile(NamedTuple):
    """A file of a chain, as a part of a database: its name, and its first byte and number of bytes there."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class AlignmentDatabase:
    """One index file and its entries."""

    index: Path
    entries: dict[str, Any]

    def files(self, key: str) -> tuple[str, list[StoredFile]]:
        """(name of the database, alignments and template searches sorted by name) of a chain that the index lists.

        Raises FileFormatError for an entry that is not in OpenFold's format.
        """
        entry = self.entries[key]
        try:
            database = Path(entry["db"]).name
            files = [StoredFile(str(name), int(offset), int(length)) for name, offset, length in entry["files"]]
            if any(not 0 <= number < _LARGEST_FILE for _, *numbers in files for number in numbers):
                raise ValueError("an offset or a length outside of any file")
            if not all(text.isprintable() for text in (key, database, *(file.name for file in files))):
                raise ValueError("no name")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            expected = '{"db": file, "files": [[name, offset, length], …]}'
            message = f"the entry of chain {shown(key)} is not {expected}; make it again"
            raise FileFormatError(self.index, message) from error
        return database, sorted(file for file in files if is_of_a_chain(file.name))


def read_databases(folder: Path) -> list[AlignmentDatabase]:
    """The databases of a folder, none if it holds no index. `super.index` lists the chains of all of them; with it the other
    indices are not read. Raises FileFormatError for a broken index, and for a chain that two of them list."""
    paths = [folder / UNIFIED_INDEX_NAME]
    if not paths[0].is_file():
        paths = sorted(folder.glob("*.index"))
    databases = [AlignmentDatabase(path, _read_entries(path)) for path in paths]
    for first, second in combinations(databases, 2):
        if twice := first.entries.keys() & second.entries.keys():
            message = f"chain {shown(min(twice))} is in {first.index.name} too; remove it from one of the two"
            raise FileFormatError(second.index, message)
    return databases


def read_parts(database: Path, key: str, files: list[StoredFile], index: str) -> Iterator[tuple[str, str, bytes]]:
    """(source for messages, name, content) of files of a database. `index`: the name of the index that lists them, for
    messages."""
    try:
        with database.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for name, offset, length in files:
                if offset + length > size:
                    raise FileFormatError(database, f"ends before '{name}' of chain '{key}' does; copy it again")
                file.seek(offset)
                data = file.read(length)
                yield f"{database}:{key}/{name}", name, data
    except OSError as error:
        raise UserError(f"{database}: cannot be read ({error.strerror}); {index} names it for '{key}'") from error


def _read_entries(path: Path) -> dict[str, Any]:
    entries = read_json(path, "make the index again")
    if not isinstance(entries, dict):
        raise FileFormatError(path, 'expected {chain: {"db": …, "files": …}}; make the index again')
    return entries
