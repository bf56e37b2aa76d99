"""How well alignments cover a query: the sequences at each residue, and the rows by their identity to the query.

Shapes: N sequences, R residues, P rows of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from evodsp.data.records import Alignment
from evodsp.geometry.residues import GAP

_MOST_ROWS = 400
"""Rows of a picture: more than a screen shows. Of larger alignments, rows at equal distances in their order are taken."""


@dataclass(frozen=True)
class Coverage:
    """The sequences of all alignments of a target together."""

    sequences: int
    counts: Int64[np.ndarray, " R"]
    """Sequences that have a letter at each residue."""
    rows: Float32[np.ndarray, "P R"]
    """Identity (0..1) of each row to the query where the row has a letter, nan elsewhere. The most similar row comes first."""


def coverage(alignments: Sequence[Alignment]) -> Coverage:
    """Coverage of the query. The identity of a row is the share of its letters that equal the query's."""
    # One alignment at a time: tens of thousands of rows are never copied together.
    counts = np.sum([_count(one) for one in alignments], axis=0)
    identities = np.concatenate([_identity(one) for one in alignments])
    order = np.argsort(-identities, kind="stable")
    shown = order[np.linspace(0, len(order) - 1, min(_MOST_ROWS, len(order))).round().astype(int)]
    starts = np.cumsum([0, *map(len, alignments)])
    alignment = np.searchsorted(starts, shown, side="right") - 1
    letters = np.stack([alignments[a].residues[row - starts[a]] for a, row in zip(alignment, shown, strict=True)])
    rows = np.where(letters == GAP, np.nan, identities[shown, None]).astype(np.float32)
    return Coverage(len(identities), counts, rows)


def _count(alignment: Alignment) -> Int64[np.ndarray, " R"]:
    return np.asarray(np.count_nonzero(alignment.residues != GAP, axis=0), np.int64)


def _identity(alignment: Alignment) -> Float32[np.ndarray, " N"]:
    present = alignment.residues != GAP
    same = (alignment.residues == alignment.residues[0]) & present
    return (same.sum(1) / np.maximum(present.sum(1), 1)).astype(np.float32)
