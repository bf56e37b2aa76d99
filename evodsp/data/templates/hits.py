"""One hit of a template search: which residues of the query are aligned with which residues of a PDB chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from evodsp.printing import logger, quoted

CHAIN = r"(?:pdb_0000)?([A-Za-z0-9]{4})_([A-Za-z0-9.]+)"
"""The name of a PDB chain: 1abc_A, or pdb_00001abc_A of the same entry. Groups: its entry of four letters, its chain."""


def of_chains(path: str | Path, found: Sequence[TemplateHit | str]) -> list[TemplateHit]:
    """The hits of a file. Those that are named as no PDB chain, of which `found` has the name alone, are left out with a
    warning."""
    if others := tuple(hit for hit in found if isinstance(hit, str)):
        _say_left_out(str(path), others)
    return [hit for hit in found if not isinstance(hit, str)]


@cache
def _say_left_out(path: str, names: tuple[str, ...]) -> None:
    """Warn, once in a process."""
    hits = "a hit is" if len(names) == 1 else f"{len(names)} hits are"
    logger(__name__).warning(
        f"{path}: {hits} left out as templates: '{quoted(names[0], 30)}' is no name of a PDB chain such as 1abc_A"
    )


@dataclass(frozen=True)
class TemplateHit:
    """One aligned chain of a template search; C columns, in which -1 stands for a gap and indices count from 0.

    `pdb_id` is lower case in search results (of chains that the user names it is as they name it), `chain_id` the
    author's. `index`: rank in the file, from 1. `aligned_columns`: columns that pair two residues, as the search tool
    counts them. `sum_probs`: HHsearch's expected number of correctly aligned residues; None for hmmsearch. `query` and
    `hit_sequence` are upper case with '-' for a gap. For HHsearch both have C columns. For hmmsearch `query` is the whole
    query (C columns), and `hit_sequence` also has the residues inserted between the columns. In both cases `hit_sequence`
    without its gaps is a contiguous piece of the chain.
    """

    index: int
    name: str
    pdb_id: str
    chain_id: str
    aligned_columns: int
    sum_probs: float | None
    query: str
    hit_sequence: str
    indices_query: Int32[np.ndarray, " C"]
    indices_hit: Int32[np.ndarray, " C"]

    @property
    def key(self) -> str:
        """The chain key, '<pdbid>_<chain>'."""
        return f"{self.pdb_id}_{self.chain_id}"

    @property
    def residues(self) -> str:
        """The hit's residues without gaps: a contiguous piece of the chain's sequence."""
        return self.hit_sequence.replace("-", "")

    @property
    def pairs(self) -> Int32[np.ndarray, "P 2"]:
        """(index in the query, index in `residues`) of every column that pairs two residues, both from 0."""
        paired = (self.indices_query >= 0) & (self.indices_hit >= 0)
        first = self.indices_hit[self.indices_hit >= 0].min(initial=np.iinfo(np.int32).max)
        return np.stack((self.indices_query[paired], self.indices_hit[paired] - first), axis=1)


def column_indices(is_residue: np.ndarray, first: int) -> Int32[np.ndarray, " C"]:
    """Residue index of each column: counted up from `first` where `is_residue`, -1 elsewhere."""
    return np.where(is_residue, first - 1 + np.cumsum(is_residue), -1).astype(np.int32)
