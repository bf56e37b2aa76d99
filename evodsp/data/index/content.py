"""From scanned chains to the arrays of an index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from evodsp.data.index.chain_index import EMPTY_FOLDER, FOLDER_OF_ITS_OWN, IndexContent, own_alignments
from evodsp.data.index.metadata import ChainFacts, table_of
from evodsp.data.index.packed_texts import PackedTexts
from evodsp.data.sources.alignment_database import StoredFile


@dataclass(frozen=True, slots=True)
class ScannedChain:
    """What a scan found of a chain."""

    key: str
    facts: ChainFacts
    structure: str
    """Its structure file, relative to the folder; '' if there is none."""
    database: str
    """OpenFold's database with its alignments; '' for a folder."""
    files: tuple[StoredFile, ...]
    has_empty_folder: bool
    problem: str
    """Why its header or first alignment could not be read, '' if it could."""


def assemble(chains: Iterable[ScannedChain], duplicates: Iterable[list[str]]) -> IndexContent:
    """The arrays of an index. `chains`: sorted by key. `duplicates`: sets of identical chains."""
    keys: list[str] = []
    sequences: list[str] = []
    structures: list[str] = []
    problems: list[str] = []
    facts: list[ChainFacts] = []
    databases: dict[str, int] = {}
    names: dict[str, int] = {}
    chain_databases: list[int] = []
    first_files = [0]
    files: list[tuple[int, int, int]] = []
    for chain in chains:
        keys.append(chain.key)
        sequences.append(chain.facts.sequence)
        structures.append(chain.structure)
        problems.append(chain.problem)
        facts.append(chain.facts)
        if chain.database:
            chain_databases.append(databases.setdefault(chain.database, len(databases)))
        else:
            chain_databases.append(EMPTY_FOLDER if chain.has_empty_folder else FOLDER_OF_ITS_OWN)
        files += [(names.setdefault(file.name, len(names)), file.offset, file.length) for file in chain.files]
        first_files.append(len(files))
    name_rows, offsets, lengths = np.array(files, np.int64).reshape(-1, 3).T
    packed = PackedTexts.of(sequences)
    table = table_of(PackedTexts.of(keys), facts)
    content = IndexContent(
        table=table,
        sequences=packed,
        structures=PackedTexts.of(structures),
        problems=PackedTexts.of(problems),
        databases=PackedTexts.of(databases),
        file_names=PackedTexts.of(names),
        chain_databases=np.array(chain_databases, np.int32),
        first_files=np.array(first_files, np.int64),
        file_name_rows=name_rows.astype(np.int32),
        file_offsets=np.ascontiguousarray(offsets),
        file_lengths=np.ascontiguousarray(lengths),
    )
    has_own = own_alignments(content)
    row_of = {key: row for row, key in enumerate(keys)}
    for same in duplicates:
        rows = [row_of[key] for key in same if key in row_of]
        owner = next((row for row in rows if has_own[row]), None)
        for row in rows:
            if owner is not None and not has_own[row]:
                table.representatives[row] = owner
    return replace(content, table=table)
