"""Alignments and structures on disk, in OpenFold's and OpenProteinSet's layouts, addressed by chain key.

A chain key is `<pdbid>_<chain>`, split at its last underscore; the chain id is the author's. The alignments of a chain are
the files of the folder `<alignment_dir>/<key>/` (`evodsp.data.chain_folder`), or entries of OpenFold's alignment database
(`alignment_db_*.db` files and one `alignment_db.index`). Structures are `<structure_dir>/<pdbid>.cif` or `.pdb`, gzipped or
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from evodsp.data.chain_folder import (
    is_alignment,
    is_search_result,
    parse_alignments,
    parse_search_result,
    read_alignment_dir,
    read_template_hits,
)
from evodsp.data.parsed_chain import ParsedChain, parse_chain
from evodsp.data.query_check import matched_alignments
from evodsp.data.records import Alignment, Chain, ProteinSequence, Structure
from evodsp.data.structures import StructureFolder
from evodsp.data.templates.hits import TemplateHit
from evodsp.data.text_files import read_json
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.geometry.alphabet import decode

UNIFIED_INDEX_NAME = "super.index"
"""OpenFold's index of all databases of a folder."""
_LARGEST_FILE = 1 << 62


@dataclass(frozen=True)
class _Database:
    """An index of OpenFold's alignment databases: {chain: {"db": file, "files": [[name, offset, length], …]}}."""

    index: Path
    entries: dict[str, Any]


def _read_index(path: Path) -> dict[str, Any]:
    entries = read_json(path, "make the index again")
    if not isinstance(entries, dict):
        raise FileFormatError(path, 'expected {chain: {"db": …, "files": …}}; make the index again')
    return entries


class FeatureStore:
    """Alignments and structures by chain key. Construction reads no file; pickling transfers only the two paths.

    `alignment_dir`: chain folders, or the alignment database. `structure_dir`: structure files; None if there are none
    (prediction). Raises UserError if a directory does not exist.
    """

    def __init__(self, alignment_dir: str | Path, structure_dir: str | Path | None = None) -> None:
        self.alignment_dir = Path(alignment_dir)
        self.structure_dir = None if structure_dir is None else Path(structure_dir)
        if not self.alignment_dir.is_dir():
            raise UserError(f"{self.alignment_dir}: no such alignment directory; check the path")
        self._structures = None if self.structure_dir is None else StructureFolder(self.structure_dir)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.alignment_dir, self.structure_dir)

    def __repr__(self) -> str:
        return f"FeatureStore('{self.alignment_dir}', '{self.structure_dir}')"

    def keys(self) -> list[str]:
        """Keys of all chains with alignments, sorted."""
        if self._databases:
            return sorted(key for database in self._databases for key in database.entries)
        return sorted(
            path.name for path in self.alignment_dir.iterdir() if path.is_dir() and not path.name.startswith(".")
        )

    def has_structure(self, key: str) -> bool:
        """Whether there is a structure file for the chain's entry (whether it has the chain is not checked)."""
        return self._structures is not None and self._structures.has_structure(key)

    def chain(self, key: str) -> Chain:
        """The chain's structure. Raises UserError, with the nearest name, if the file or the chain is missing."""
        return self._folder(key).chain(key)

    def structure(self, pdb_id: str) -> Structure:
        """All protein chains of an entry. Raises UserError, with the nearest name, if its file is missing."""
        return self._folder(pdb_id).structure(pdb_id)

    def _folder(self, key: str) -> StructureFolder:
        if self._structures is None:
            raise UserError(f"chain {key}: no structure directory was given; set it to the folder of .cif files")
        return self._structures

    def parsed(self, key: str, with_hits: bool) -> ParsedChain:
        """The chain, read from its files (`parse_chain`)."""
        return parse_chain(self, key, with_hits)

    def query(self, key: str) -> ProteinSequence:
        """The chain's sequence: from its structure (SEQRES) if there is one, else the first row of its first alignment."""
        if self.has_structure(key):
            return self.chain(key).query(key)
        alignments = self._read_alignments(key, None)
        if not alignments:
            raise UserError(
                f"chain {key}: its alignments are empty and it has no structure, so its sequence is unknown"
            )
        return ProteinSequence(name=key, letters=decode(alignments[0].residues[0]))

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        """The chain's alignments, sorted by file name. The first row of each is checked to be the query.

        `query`: the chain's sequence, if it is known already; otherwise it is read from the structure, if there is one.
        Raises UserError as `read_alignment_dir` does, with the nearest key if the chain has no alignments.
        """
        if query is None and self.has_structure(key):
            query = self.query(key)
        return self._read_alignments(key, query)

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        """Hits of the chain's template searches (.hhr, hmm_output.sto), in the order of the files; empty if there are none.

        `query`: the chain's sequence. Raises UserError if the chain is unknown, FileFormatError for a broken file.
        """
        if not self._databases:
            return read_template_hits(self.alignment_dir / key, query)
        return [
            hit
            for source, name, data in self._database_files(key)
            if is_search_result(name)
            for hit in parse_search_result(source, query.letters, data)
        ]

    def _read_alignments(self, key: str, query: ProteinSequence | None) -> list[Alignment]:
        if self._databases:
            return self._from_database(key, query)
        directory = self.alignment_dir / key
        if not directory.is_dir():
            raise UserError(
                f"{self.alignment_dir}: no alignments of chain '{key}'; add its folder or drop the chain."
                f"{nearest(key, self.keys())}"
            )
        return read_alignment_dir(directory, query)

    @cached_property
    def _databases(self) -> list[_Database]:
        """OpenFold's databases. `super.index` lists the chains of all of them; with it the other indices are not read."""
        paths = [self.alignment_dir / UNIFIED_INDEX_NAME]
        if not paths[0].is_file():
            paths = sorted(self.alignment_dir.glob("*.index"))
        databases = [_Database(path, _read_index(path)) for path in paths]
        for first, second in combinations(databases, 2):
            if twice := first.entries.keys() & second.entries.keys():
                message = f"chain '{min(twice)}' is in {first.index.name} too; remove it from one of the two"
                raise FileFormatError(second.index, message)
        return databases

    def _from_database(self, key: str, query: ProteinSequence | None) -> list[Alignment]:
        files = [(source, data) for source, name, data in self._database_files(key) if is_alignment(name)]
        if not files:
            raise UserError(
                f"{self.alignment_dir}: no alignment (.a3m or .sto) of chain '{key}' in the database; make it again"
            )
        return matched_alignments(parse_alignments(files), query)

    def _database_files(self, key: str) -> Iterator[tuple[str, str, bytes]]:
        """(source for messages, name, content) of a chain's alignments and template searches, sorted by name."""
        found = next((database for database in self._databases if key in database.entries), None)
        if found is None:
            indices = ", ".join(database.index.name for database in self._databases)
            raise UserError(
                f"{self.alignment_dir}: no alignments of chain '{key}' in {indices}; make the index again or drop the chain."
                f"{nearest(key, self.keys())}"
            )
        entry = found.entries[key]
        try:
            database = self.alignment_dir / Path(entry["db"]).name
            files = sorted((str(name), int(offset), int(length)) for name, offset, length in entry["files"])
            if any(not 0 <= number < _LARGEST_FILE for _, *numbers in files for number in numbers):
                raise ValueError("an offset or a length outside of any file")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            message = f'the entry of chain \'{key}\' is not {{"db": file, "files": [[name, offset, length], …]}}; make it again'
            raise FileFormatError(found.index, message) from error
        try:
            with database.open("rb") as file:
                for name, offset, length in files:
                    if not (is_alignment(name) or is_search_result(name)):
                        continue
                    file.seek(offset)
                    data = file.read(length)
                    if len(data) < length:
                        raise FileFormatError(database, f"ends before '{name}' of chain '{key}' does; copy it again")
                    yield f"{database}:{key}/{name}", name, data
        except OSError as error:
            raise UserError(
                f"{database}: cannot be read ({error.strerror}); {found.index.name} names it for '{key}'"
            ) from error
