"""Merging the alignments of one chain into the MSA that the feature pipeline samples from (supplement 1.2.1, 1.2.3).

Shapes: N sequences, L columns (residues of the query).

Alignments and template hits are checked: they must have been made with the query that they are used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32, Int64, Integer

from evodsp.data.formats import PARSERS
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError
from evodsp.geometry.residues import LETTERS_WITH_GAP, UNKNOWN, decode, encode


class QueryMismatch(UserError):
    """Alignments or template hits that were made with another sequence, `found` (codes)."""

    def __init__(self, message: str, found: Int8[np.ndarray, " L"] | None = None) -> None:
        super().__init__(message)
        self.found = found


def check_query(
    where: str,
    found: Int8[np.ndarray, " L"],
    query_name: str,
    query: Int8[np.ndarray, " M"],
    fix: str,
    positions: Integer[np.ndarray, " L"] | None = None,
) -> None:
    """Raise QueryMismatch unless `found`, the query as it stands in `where`, equals `query`. X on either side matches all.

    `positions`: index of each residue in the whole query, for the message, if only a part of it is compared.
    """
    if len(found) != len(query):
        raise QueryMismatch(f"{where} has {len(found)} residues, {query_name} has {len(query)}; {fix}", found)
    differs = np.flatnonzero(_differ(found, query))
    if differs.size:
        at = int(differs[0])
        letter, expected = decode(found[at : at + 1]), decode(query[at : at + 1])
        position = 1 + (at if positions is None else int(positions[at]))
        raise QueryMismatch(
            f"{where} has '{letter}' at position {position}, {query_name} has '{expected}' "
            f"({differs.size} {'position differs' if differs.size == 1 else 'positions differ'}); {fix}",
            found,
        )


def _differ(found: Int8[np.ndarray, " L"], expected: Int8[np.ndarray, " L"]) -> Bool[np.ndarray, " L"]:
    """Mask of the codes that differ. X on either side matches all."""
    return (found != expected) & (found != UNKNOWN) & (expected != UNKNOWN)


def matched_alignments(alignments: Sequence[Alignment], query: ProteinSequence | None = None) -> list[Alignment]:
    """`alignments`, each with the query as its first row. Raises UserError as `check_alignments` does.

    OpenFold's FASTA files list all monomers of a residue with several (3jqh_A has 170 letters for 167 residues). Of an
    alignment that was made with such a query, the columns of monomers that the chain does not have are dropped.
    """
    matched = [_without_alternatives(alignment, query) for alignment in alignments] if query else list(alignments)
    check_alignments(matched, query)
    return matched


def _without_alternatives(alignment: Alignment, query: ProteinSequence) -> Alignment:
    """The alignment with one column for each residue of the query, if its first row lists all monomers of the query."""
    listed, kept = _all_monomers(query)
    first = alignment.residues[0]
    if len(kept) == len(listed) or len(first) != len(listed):
        return alignment
    if _differ(first, listed).any():
        return alignment
    # What was deleted before a dropped column was deleted before the next one that stays.
    first = np.concatenate(([0], kept[:-1] + 1))
    deletions = np.add.reduceat(alignment.deletions[:, : kept[-1] + 1], first, axis=1, dtype=np.int32)
    return replace(alignment, residues=np.ascontiguousarray(alignment.residues[:, kept]), deletions=deletions)


def matched_hits(hits: Sequence[TemplateHit], query: ProteinSequence) -> tuple[TemplateHit, ...]:
    """`hits`, numbered along the query. Those of a search whose query lists all monomers lose the surplus ones.

    Hits of other queries are returned as they are: `templates.build` refuses them.
    """
    listed, kept = _all_monomers(query)
    if len(kept) == len(listed):
        return tuple(hits)
    place = np.full(len(listed), -1, np.int32)
    place[kept] = np.arange(len(kept))
    return tuple(
        _renumbered(hit, place) if _agrees(hit, listed) and not _agrees(hit, encode(query.letters)) else hit
        for hit in hits
    )


def _agrees(hit: TemplateHit, query: Int8[np.ndarray, " M"]) -> bool:
    """Whether the hit's letters of the query are those of `query` at their indices."""
    at = hit.indices_query[hit.indices_query >= 0]
    if at.size and at.max() >= len(query):
        return False
    found, expected = encode(hit.query.replace("-", "")), query[at]
    return len(found) == len(expected) and not _differ(found, expected).any()


def _renumbered(hit: TemplateHit, place: Int32[np.ndarray, " M"]) -> TemplateHit:
    """The hit with `place[i]` for residue i of its query; -1 leaves the residue out."""
    indices = np.where(hit.indices_query >= 0, place[hit.indices_query], -1).astype(np.int32)
    letters = "".join(letter if index >= 0 else "-" for letter, index in zip(hit.query, indices, strict=True))
    paired = int(((indices >= 0) & (hit.indices_hit >= 0)).sum())
    lost = int(((hit.indices_query >= 0) & (hit.indices_hit >= 0)).sum()) - paired
    return replace(hit, indices_query=indices, query=letters, aligned_columns=hit.aligned_columns - lost)


def all_monomers(query: ProteinSequence) -> str:
    """The letters of all monomers of all residues, in the order of SEQRES."""
    several = dict(query.alternatives)
    return "".join(several.get(index, letter) for index, letter in enumerate(query.letters))


def _all_monomers(query: ProteinSequence) -> tuple[Int8[np.ndarray, " M"], Int64[np.ndarray, " L"]]:
    """The codes of `all_monomers`, and where the query's own are among them."""
    several, before, kept = dict(query.alternatives), 0, []
    for index, letter in enumerate(query.letters):
        monomers = several.get(index, letter)
        kept.append(before + max(monomers.find(letter), 0))
        before += len(monomers)
    return encode(all_monomers(query)), np.array(kept, np.int64)


def check_alignments(alignments: Sequence[Alignment], query: ProteinSequence | None = None) -> None:
    """Raise QueryMismatch unless the first row of every alignment is the query (default: the first alignment's first row).

    The message names the file, the first position that differs and both letters.
    """
    if not alignments:
        return
    if query is None:
        expected, name = alignments[0].residues[0], f"the first row of {Path(alignments[0].source).name}"
    else:
        expected, name = encode(query.letters), f"the query '{query.name}'"
    for alignment in alignments:
        where = f"{alignment.source}: the first row '{alignment.names[0]}'"
        fix = "search again with this query, or remove the file"
        check_query(where, alignment.residues[0], name, expected, fix)


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
