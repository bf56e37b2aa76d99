"""Merging the alignments of one chain into the MSA that the feature pipeline samples from (supplement 1.2.1, 1.2.3).

Shapes: N sequences, L columns (residues of the query).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int8, Int64, Integer

from evodsp.data.formats import PARSERS
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.errors import UserError
from evodsp.geometry.residues import LETTERS_WITH_GAP, encode

_CELLS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class MsaFeatures:
    """All distinct sequences aligned to one chain; row 0 is the query.

    `deletions`: number of residues deleted to the left of each column, in any integers. `profile`: frequency of each letter,
    gap included, in each column over ALL rows, before any sampling.
    """

    msa: Int8[np.ndarray, "N L"]
    deletions: Integer[np.ndarray, "N L"]
    profile: Float32[np.ndarray, "L 22"]

    def __post_init__(self) -> None:
        rows, columns = self.msa.shape
        agree = self.deletions.shape == self.msa.shape and self.profile.shape == (columns, LETTERS_WITH_GAP)
        if not (rows and columns and agree):
            raise ValueError(f"msa {self.msa.shape}, deletions {self.deletions.shape}, profile {self.profile.shape}")

    @property
    def num_alignments(self) -> int:
        """Number of distinct sequences, the query included."""
        return len(self.msa)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes, for caches of bounded size."""
        return self.msa.nbytes + self.deletions.nbytes + self.profile.nbytes


def holds_query_alone(alignments: Sequence[Alignment]) -> bool:
    """Whether no row of any alignment differs from the query: no related sequence was found."""
    return all(bool((alignment.residues == alignments[0].residues[0]).all()) for alignment in alignments)


def first_occurrences(rows: Int8[np.ndarray, "N L"]) -> Int64[np.ndarray, " M"]:
    """Indices of the rows that equal no earlier row, ascending."""
    contiguous = np.ascontiguousarray(rows)
    as_bytes = contiguous.view(np.dtype((np.void, contiguous.shape[1]))).ravel()
    return np.sort(np.unique(as_bytes, return_index=True)[1])


def letter_profile(msa: Int8[np.ndarray, "N L"]) -> Float32[np.ndarray, "L 22"]:
    """Frequency of each of the 22 letters in each column."""
    rows, columns = msa.shape
    counts, at_once = np.zeros(columns * LETTERS_WITH_GAP, np.int64), max(1, _CELLS_AT_ONCE // columns)
    for start in range(0, rows, at_once):
        cells = msa[start : start + at_once] + np.arange(0, len(counts), LETTERS_WITH_GAP, dtype=np.int64)
        counts += np.bincount(cells.ravel(), minlength=len(counts))
    return (counts.reshape(columns, LETTERS_WITH_GAP) / rows).astype(np.float32)


def merge_alignments(alignments: Sequence[Alignment]) -> MsaFeatures:
    """Join `alignments`, in their order, into one MSA that keeps the first of equal sequences.

    Sequences are compared by residue codes: rows that differ only in the letter of a non-standard residue (B and D, U and C)
    are equal. Raises UserError if the alignments differ in their number of columns, or if there are none.
    """
    if not alignments:
        raise UserError(f"no alignment to build the MSA from; put a file ({', '.join(PARSERS)}) into its folder")
    first = alignments[0]
    for other in alignments[1:]:
        if other.columns != first.columns:
            raise UserError(
                f"{other.source}: {other.columns} columns, but {first.source} has {first.columns}; "
                "all alignments of a chain must have the same query"
            )
    residues, deletions = (_joined([getattr(a, name) for a in alignments]) for name in ("residues", "deletions"))
    kept = first_occurrences(residues)
    msa = _chosen(residues, kept)
    return MsaFeatures(msa, _chosen(deletions, kept), letter_profile(msa))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all parts; not a copy if there is one part only."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _chosen(rows: np.ndarray, kept: Int64[np.ndarray, " M"]) -> np.ndarray:
    """Ascending rows; not a copy if all are kept."""
    return rows if len(kept) == len(rows) else rows[kept]


def msa_of(alignments: Sequence[Alignment], query: ProteinSequence) -> MsaFeatures:
    """The MSA of a chain; without alignments the query alone."""
    return merge_alignments(alignments) if alignments else query_only(encode(query.letters))


def query_only(query: Int8[np.ndarray, " L"]) -> MsaFeatures:
    """The MSA of a chain without homologues: only the query."""
    msa = query[None]
    return MsaFeatures(msa, np.zeros(msa.shape, np.uint8), letter_profile(msa))
