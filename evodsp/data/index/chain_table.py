"""What is known of each chain without reading its files: the columns that filters, weights and reports of a data set need.

The index of a data set (`evodsp data index`) stores such a table and opens it as memory maps, so that the workers and ranks
of a machine share one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float32, Int32

UNKNOWN_DAY = np.iinfo(np.int32).min
"""Release day of a chain whose entry has no date."""
UNKNOWN_CLUSTER = -1
"""Cluster size of a chain that the cluster file does not list; also what OpenFold writes for it."""


@dataclass(frozen=True)
class ChainTable:
    """n chains, in the order of their keys. Each column has one entry per chain."""

    keys: Sequence[str]
    """`<entry>_<chain>`, sorted, distinct."""
    lengths: Int32[np.ndarray, " n"]
    """Residues of the whole chain (SEQRES); 0 if unknown."""
    resolutions: Float32[np.ndarray, " n"]
    """In Å; 0: the method has none (NMR), as in AlphaFold2's and OpenFold's caches; NaN if unknown."""
    release_days: Int32[np.ndarray, " n"]
    """Days since 1970-01-01; `UNKNOWN_DAY` if unknown."""
    cluster_sizes: Int32[np.ndarray, " n"]
    """Chains in the chain's sequence cluster, itself included; `UNKNOWN_CLUSTER` if unknown."""
    largest_fractions: Float32[np.ndarray, " n"]
    """Share of the commonest residue type in the sequence, X counted as a type of its own; NaN if the sequence is unknown."""
    unknown_fractions: Float32[np.ndarray, " n"]
    """Share of X in the sequence; NaN if the sequence is unknown."""
    representatives: Int32[np.ndarray, " n"]
    """Row of the chain whose alignments this chain uses: its own row, or that of an identical chain."""

    def __post_init__(self) -> None:
        for column in fields(self)[1:]:
            if (entries := len(getattr(self, column.name))) != len(self.keys):
                raise ValueError(f"{column.name} has {entries} entries for {len(self.keys)} chains")

    def __len__(self) -> int:
        return len(self.keys)
