"""Pairing rows of different chains' MSAs, as AlphaFold-Multimer's code does (supplement of AlphaFold-Multimer, MSA
pairing).

Rows of different chains are paired where their keys are equal. A rule says which rows of which files have one.

In ColabFold's alignment of a complex the gaps of a row say whether it is paired.

Shapes: N rows of an MSA, L columns of a chain, R residues or columns of all chains, E entities, P paired rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int8, Int64, Integer

from evodsp.data.records import Alignment, ProteinSequence, RowNames
from evodsp.data.sources.layout import is_alignment, is_for_pairing, may_hold, pairing_files, parse_alignments
from evodsp.data.sources.msa import MsaFeatures, first_occurrences, matched_alignments, merge_alignments
from evodsp.errors import UserError
from evodsp.geometry.residues import GAP
from evodsp.printing import logger

ABSENT = -1
"""Stands for a row of gaps, where an entity has no row of a key."""
MOST_OF_A_KEY = 600
MOST_ROWS = 50_000
_NAMED = 10
"""Chains without rows for pairing that a process names in warnings."""

RowKey = Callable[[str], str]
"""Function of a row's name that gives its key; '' for a row that is paired with none."""

_UNIPROT = re.compile(
    r"(?:sp|tr)\|"
    r"[A-Za-z0-9]{6,10}(?:_\d)?\|"  # accession, and the number of an isoform
    r"[A-Za-z0-9]+_([A-Za-z0-9]{1,5})(?:_\d+)?"  # entry name: a protein, then a species; small BFD appends a number
)


def entry_of_row(name: str) -> str:
    """The entry of a row with the name of a chain: 1ao7 of `1ao7_A`; '' of other names."""
    return (name.split(maxsplit=1) or [""])[0].rpartition("_")[0]


def uniprot_species(name: str) -> str:
    """The species of a UniProt name, such as BOVIN of `sp|P61823|RNAS1_BOVIN/1-150`; '' if the name is none of UniProt's.

    Only the first word counts, up to a slash. The names that are recognised are those of AlphaFold-Multimer's code.
    """
    found = _UNIPROT.fullmatch((name.split(maxsplit=1) or [""])[0].partition("/")[0])
    return found[1] if found else ""


@dataclass(frozen=True)
class PairingRule:
    """Rule that pairs rows of different chains."""

    key: RowKey
    """The key of a row; rows with equal keys are paired."""
    reads: Callable[[str], bool]
    """Whether the rows of a file of that name are paired."""
    names: str
    """The files and the names of their rows, for messages."""


BY_SPECIES = PairingRule(
    uniprot_species, is_for_pairing, "uniprot_hits.sto or .a3m, with names such as tr|A0A024R161|A0A024R161_HUMAN"
)
"""AlphaFold-Multimer's: rows of `uniprot_hits`, by the species of their UniProt names."""
BY_ENTRY = PairingRule(entry_of_row, is_alignment, "any alignment, with names such as 1ao7_A")
"""Rows of all alignments, by the entry that their names begin with: `1ao7_A` is paired with `1ao7_B`. For families whose
complexes are known and whose rows have the names of chains."""
RuleName = Literal["species", "entry"]
RULES: dict[RuleName, PairingRule] = {"species": BY_SPECIES, "entry": BY_ENTRY}
"""The rules by the names that settings have for them."""


@dataclass(frozen=True)
class PairingMsa:
    """An MSA of one chain for pairing: row 0 is the query, `keys` has the key of each row ('': paired with none)."""

    msa: Int8[np.ndarray, "N L"]
    deletions: Integer[np.ndarray, "N L"]
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.msa.size or self.msa.shape != self.deletions.shape or len(self.keys) != len(self.msa):
            found = f"letters {self.msa.shape}, deletions {self.deletions.shape}, {len(self.keys)} keys"
            raise UserError(f"an MSA for pairing has {found}; give each row, at least the query, all three")

    @classmethod
    def of(cls, alignment: Alignment, key: RowKey = uniprot_species, most_rows: int = MOST_ROWS) -> PairingMsa:
        """The first of equal sequences among the first `most_rows` rows of an alignment, each with the key of its name."""
        kept = first_occurrences(alignment.residues[:most_rows])
        return cls(
            alignment.residues[kept], alignment.deletions[kept], tuple(key(alignment.names[row]) for row in kept)
        )


def pair(
    msas: Sequence[PairingMsa], copies: Sequence[int], most_of_a_key: int = MOST_OF_A_KEY
) -> Int64[np.ndarray, "P E"]:
    """The rows of each entity's MSA that stand beside one another; `ABSENT` where an entity has no row of the key.

    `copies`: the number of chains of each entity, which all take part with the same row. A key is paired if at least two
    chains have it, unless an entity has more than `most_of_a_key` rows of it. Of each entity that has it, the rows most
    similar to the query (most equal columns) are taken in that order, as many as the entity with the fewest has.

    Row 0 pairs the queries. The others are sorted by the number of chains that have the key, descending, and then by the
    product of all chains' row numbers, ascending, as a measure of e-values. Ties stay in the order of the keys, and of the
    rows of an MSA; AlphaFold-Multimer's code leaves them to an unstable sort. Products are of int64 and wrap, as there.
    """
    key_of_row = np.concatenate([np.array(msa.keys) for msa in msas])
    keys, codes = np.unique(key_of_row, return_inverse=True)
    codes_of = np.split(codes, np.cumsum([len(msa.keys) for msa in msas])[:-1])
    counts = np.stack([np.bincount(code, minlength=len(keys)) for code in codes_of])  # [E, keys]
    chains = np.array(copies) @ (counts > 0)
    is_paired = (keys != "") & (chains >= 2) & (counts <= most_of_a_key).all(0)
    taken = np.where(counts > 0, counts, counts.max()).min(0) * is_paired
    start = np.cumsum(taken) - taken

    rows = np.full((taken.sum(), len(msas)), ABSENT, np.int64)
    for entity, (msa, code) in enumerate(zip(msas, codes_of, strict=True)):
        similarity = (msa.msa == msa.msa[0]).sum(1)
        order = np.lexsort((-similarity, code))
        sorted_code = code[order]
        rank = np.arange(len(order)) - np.searchsorted(sorted_code, sorted_code)
        best = rank < taken[sorted_code]
        rows[start[sorted_code[best]] + rank[best], entity] = order[best]

    product = np.abs(np.repeat(rows, copies, axis=1).prod(1))
    order = np.lexsort((product, -np.repeat(chains, taken)))
    return np.concatenate((np.zeros((1, len(msas)), np.int64), rows[order]))


def file_of_pairs(folder: Path, name: str) -> Path:
    """The paired rows that a server has found for the complex `name`, in a folder of alignments: ColabFold's alignment of a
    complex, in which all rows are paired."""
    return folder / f"{name}_paired" / "pair.a3m"


def files_for_pairing(place: Path, rule: PairingRule) -> list[Path]:
    """The files of a chain whose rows are paired. `place`: the folder of its alignments, or its only alignment."""
    if place.is_file():
        return [place] if may_hold(place.name, rule.reads) else []
    return pairing_files(place, rule.reads)


def pairing_msa(place: Path, query: ProteinSequence, rule: PairingRule) -> PairingMsa | None:
    """The rows of a chain that are paired with those of others; None, and a warning, if there are none.

    `place`: as for `files_for_pairing`. Raises UserError if a first row is not the query.
    """
    files = files_for_pairing(place, rule)
    paired = matched_alignments(parse_alignments(((path, None) for path in files), rule.reads), query)
    return rows_for_pairing(paired, rule, str(place), say_query_paired)


def rows_for_pairing(
    alignments: Sequence[Alignment], rule: PairingRule, place: str, warn: Callable[[str, str], None]
) -> PairingMsa | None:
    """The rows for pairing of the alignments of one chain, which lie in `place`.

    None, and a warning, if there are no rows, or none whose name has a key.
    """
    pairing = PairingMsa.of(joined(alignments), rule.key) if alignments else None
    if pairing is None or not any(pairing.keys[1:]):
        warn(place, rule.names)
        return None
    # Queries are paired in any case; with keys of their own they would be paired twice.
    return dataclasses.replace(pairing, keys=("", *pairing.keys[1:]))


@cache
def say_query_paired(folder: str, names: str) -> None:
    """Warn, once in a process, that a chain has no rows for pairing. After some chains further ones are not named."""
    said = say_query_paired.cache_info().currsize
    if said < _NAMED:
        logger(__name__).warning(f"{folder}: no rows to pair with other chains ({names}); its query alone is paired")
    elif said == _NAMED:
        logger(__name__).warning(
            f"{folder}: no rows to pair with other chains either; further chains like it are not named here ('evodsp data "
            "doctor' names all)"
        )


def joined(alignments: Sequence[Alignment]) -> Alignment:
    """One alignment with the rows of several that have the same query."""
    return Alignment(
        alignments[0].source,
        RowNames(name for alignment in alignments for name in alignment.names),
        np.concatenate([alignment.residues for alignment in alignments]),
        np.concatenate([alignment.deletions for alignment in alignments]),
    )


def split_alignment(alignment: Alignment, lengths: Sequence[int]) -> tuple[tuple[MsaFeatures, PairingMsa | None], ...]:
    """For each of the sequences side by side: its MSA, and its rows that are paired (None for a single sequence).

    A row with residues of several sequences is paired, as in ColabFold; its key is its number, so that `pair` puts the parts of
    a row together again. All other rows belong to the MSA of the only sequence that they cover.
    """
    borders = np.cumsum([0, *lengths])
    columns = [slice(*borders[place : place + 2]) for place in range(len(lengths))]
    covered = np.stack([(alignment.residues[:, own] != GAP).any(1) for own in columns])  # [sequences, N]
    paired = covered.sum(0) > 1
    paired[0] = False  # the queries are paired in any case
    found: list[tuple[MsaFeatures, PairingMsa | None]] = []
    for own, present in zip(columns, covered, strict=True):
        alone, rows = np.flatnonzero(present & ~paired), np.flatnonzero(present & paired)
        part = dataclasses.replace(
            alignment,
            names=tuple(alignment.names[row] for row in alone.tolist()),
            residues=alignment.residues[alone, own],
            deletions=alignment.deletions[alone, own],
        )
        with_query = np.concatenate(([0], rows))
        keys = ("", *map(str, rows.tolist()))
        pairing = PairingMsa(alignment.residues[with_query, own], alignment.deletions[with_query, own], keys)
        found.append((merge_alignments([part]), pairing if len(lengths) > 1 else None))
    return tuple(found)
