"""From scanned chains to the arrays of an index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32

from evodsp.data.alignment_database import StoredFile
from evodsp.data.chain_table import ChainTable
from evodsp.data.index import FOLDER_OF_ITS_OWN, IndexContent, own_alignments
from evodsp.data.metadata import ChainFacts
from evodsp.data.packed_texts import PackedTexts
from evodsp.geometry.alphabet import LETTERS_WITH_X, UNKNOWN, encode_sequence


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
    problem: str
    """Why its header or first alignment could not be read, '' if it could."""


def assemble(chains: Iterable[ScannedChain], duplicates: Iterable[list[str]]) -> IndexContent:
    """The arrays of an index. `chains`: sorted by key. `duplicates`: sets of identical chains."""
    keys: list[str] = []
    sequences: list[str] = []
    structures: list[str] = []
    problems: list[str] = []
    numbers: list[tuple[float, int, int]] = []
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
        numbers.append((chain.facts.resolution, chain.facts.release_day, chain.facts.cluster_size))
        own = databases.setdefault(chain.database, len(databases)) if chain.database else FOLDER_OF_ITS_OWN
        chain_databases.append(own)
        files += [(names.setdefault(file.name, len(names)), file.offset, file.length) for file in chain.files]
        first_files.append(len(files))
    resolutions, days, clusters = np.array(numbers, np.float64).reshape(-1, 3).T
    name_rows, offsets, lengths = np.array(files, np.int64).reshape(-1, 3).T
    fractions = np.array([residue_fractions(sequence) for sequence in sequences], np.float32).reshape(-1, 2)
    n = len(keys)
    packed = PackedTexts.of(sequences)
    table = ChainTable(
        keys=PackedTexts.of(keys),
        lengths=packed.lengths().astype(np.int32),
        resolutions=resolutions.astype(np.float32),
        release_days=days.astype(np.int32),
        cluster_sizes=clusters.astype(np.int32),
        largest_fractions=np.ascontiguousarray(fractions[:, 0]),
        unknown_fractions=np.ascontiguousarray(fractions[:, 1]),
        representatives=np.arange(n, dtype=np.int32),
    )
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


def residue_fractions(sequence: str) -> Float32[np.ndarray, " 2"]:
    """Share of the commonest residue type, X counted as one, and share of X; NaN for an empty sequence."""
    if not sequence:
        return np.full(2, np.nan, np.float32)
    counts = np.bincount(encode_sequence(sequence), minlength=LETTERS_WITH_X)
    return np.array([counts.max(), counts[UNKNOWN]], np.float32) / np.float32(len(sequence))
