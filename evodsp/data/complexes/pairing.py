"""Pairing rows of different chains' MSAs, as AlphaFold-Multimer's code does (supplement of AlphaFold-Multimer, MSA pairing).

Shapes: N rows of an MSA, L columns of a chain, E entities, P paired rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int8, Int64, Integer

from evodsp.data.complexes.keys import RowKey, uniprot_species
from evodsp.data.records import Alignment
from evodsp.data.sources.msa import first_occurrences
from evodsp.errors import UserError

ABSENT = -1
"""Stands for a row of gaps, where an entity has no row of a key."""
MOST_OF_A_KEY = 600
MOST_ROWS = 50_000


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
