"""The MSAs of chains from ColabFold's alignment of a complex, whose rows say by their gaps which of them are paired.

Shapes: N rows, R columns of all sequences side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from evodsp.data.complexes.pairing import PairingMsa
from evodsp.data.records import Alignment
from evodsp.data.sources.msa import MsaFeatures, merge_alignments
from evodsp.geometry.residues import GAP


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
