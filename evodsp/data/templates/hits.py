"""One hit of a template search, which residues of the query are aligned with which residues of a PDB chain; and filters
of hits by date, identity, coverage and length (supplement 1.2.3).

The filters are pure functions of the hit, the query and dates. Each rejection has a name, so that a log can count them.
Structures are not read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jaxtyping import Int32

from evodsp.errors import UserError
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


_NO_OBSOLETE: Mapping[str, str | None] = MappingProxyType({})


class Rejection(Enum):
    """The reasons why filters reject hits; the values are for logs."""

    OBSOLETE = "the entry was withdrawn without a successor"
    SAME_ENTRY = "the query's own entry"
    UNKNOWN_DATE = "release date unknown"
    TOO_RECENT = "released too late"
    LOW_COVERAGE = "covers too little of the query"
    DUPLICATE_OF_QUERY = "(nearly) the query itself"
    TOO_SHORT = "too few residues"
    DUPLICATE_CHAIN = "another chain of the entry has the same alignment"


@dataclass(frozen=True)
class HitLimits:
    """Limits of the supplement 1.2.3, with AF2's values.

    `max_date`: last allowed release date. `days_before_query`: a template must have been released at least this many days
    before the query (AF2: 60, since entries of one study appear weeks apart); at least 1. `min_coverage`: aligned columns
    over the query's length must exceed it. `max_query_fraction`: a hit that is a piece of the query must not exceed this
    fraction of its length. `min_residues`: the fewest residues of a hit. `drop_duplicate_chains`: of several chains of an
    entry with the same residues in the same columns keep one (AF2 keeps all).
    """

    max_date: date | None = None
    days_before_query: int = 60
    min_coverage: float = 0.1
    max_query_fraction: float = 0.95
    min_residues: int = 10
    drop_duplicate_chains: bool = False

    def __post_init__(self) -> None:
        if self.days_before_query < 1:
            raise UserError(
                f"days_before_query is {self.days_before_query}; give 1 or more, or templates leak the answer"
            )

    def last_date(self, query_release_date: date | None) -> date | None:
        """Last allowed release date of a template. `query_release_date`: None for a query without structure."""
        before = None if query_release_date is None else query_release_date - timedelta(self.days_before_query)
        return min((limit for limit in (self.max_date, before) if limit is not None), default=None)


def reject_date(release_date: date | None, last_date: date | None) -> Rejection | None:
    """The reason to reject a hit by its date; None if it was released by `last_date` (None: no limit).

    Under a limit an unknown date is rejected: it might leak.
    """
    if last_date is None:
        return None
    if release_date is None:
        return Rejection.UNKNOWN_DATE
    return Rejection.TOO_RECENT if release_date > last_date else None


def reject_alignment(hit: TemplateHit, query: str, limits: HitLimits) -> Rejection | None:
    """None if the hit covers enough of the query (one-letter codes), is not a large piece of it, and is long enough."""
    if hit.aligned_columns <= limits.min_coverage * len(query):
        return Rejection.LOW_COVERAGE
    if len(hit.residues) > limits.max_query_fraction * len(query) and hit.residues in query:
        return Rejection.DUPLICATE_OF_QUERY
    return Rejection.TOO_SHORT if len(hit.residues) < limits.min_residues else None


@dataclass(frozen=True)
class HitSelection:
    """The hits that passed the filters, best first, and the rejected hits with reasons, in the same order."""

    kept: tuple[TemplateHit, ...]
    rejected: tuple[tuple[TemplateHit, Rejection], ...]


def select_hits(
    hits: list[TemplateHit],
    query: str,
    is_known: Callable[[str], bool],
    released_on: Callable[[str], date | None],
    limits: HitLimits,
    *,
    query_release_date: date | None = None,
    query_pdb_id: str | None = None,
    obsolete: Mapping[str, str | None] = _NO_OBSOLETE,
) -> HitSelection:
    """Apply all filters to all hits, sorted by falling `sum_probs` (file order among equals and for hmmsearch).

    `query`: the query's one-letter codes. `is_known`: whether an entry (lower case) is there. `released_on`: its release date,
    None if that is not known; it is asked only under a limit, because it may read a file. `query_release_date`,
    `query_pdb_id`: the release date and the entry of a query of known structure (training). `obsolete` (`parse_obsolete`)
    replaces withdrawn entries that are not known; kept hits have the new `pdb_id`. The reason of a rejection is the first that
    applies, in the order of `Rejection`.
    """
    last_date = limits.last_date(query_release_date)
    kept: list[TemplateHit] = []
    rejected: list[tuple[TemplateHit, Rejection]] = []
    seen: set[tuple[str, str, bytes, bytes]] = set()
    for hit in sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)):
        pdb_id = hit.pdb_id if is_known(hit.pdb_id) else obsolete.get(hit.pdb_id, hit.pdb_id)
        if pdb_id is None:
            rejected.append((hit, Rejection.OBSOLETE))
            continue
        hit = replace(hit, pdb_id=pdb_id)
        alignment = (pdb_id, hit.hit_sequence, hit.indices_query.tobytes(), hit.indices_hit.tobytes())
        if query_pdb_id is not None and pdb_id == query_pdb_id.lower():
            reason: Rejection | None = Rejection.SAME_ENTRY
        else:
            released = None if last_date is None else released_on(pdb_id)
            reason = reject_date(released, last_date) or reject_alignment(hit, query, limits)
        if reason is None and limits.drop_duplicate_chains and alignment in seen:
            reason = Rejection.DUPLICATE_CHAIN
        if reason is None:
            seen.add(alignment)
            kept.append(hit)
        else:
            rejected.append((hit, reason))
    return HitSelection(tuple(kept), tuple(rejected))
