"""Template search results (HHsearch, hmmsearch) into hits, and the filters of the AF2 supplement, section 1.2.3.

A hit pairs columns of the query with columns of a chain of the Protein Data Bank. The filters are pure functions of the
hit, the query and dates; each rejection has a name, so that a log can count them. Structures are not looked at here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from evodsp.data.text_files import check_text, read_bytes, unpack
from evodsp.errors import FileFormatError, UserError

_CHAIN = re.compile(r"([A-Za-z0-9]{4})_([A-Za-z0-9.]+)")
_HHR_HIT = re.compile(r"No +(\d{1,9})\s*$")
_HHR_TABLE_ROW = re.compile(r" *(\d+) +\S")
_HHR_SCORES = re.compile(r"Probab=.*\bAligned_cols=(\d{1,9})\b.*\bSum_probs=([-+.0-9eE]+)")
_HHR_ROW = re.compile(r"([QT]) (\S+) +(\d{1,9}) ([A-Za-z~.-]+) +(\d{1,9}) \( *\d+\)\s*$")
_HMM_NAME = re.compile(r"([A-Za-z0-9]{4})_([A-Za-z0-9.]+)/(\d{1,9})-(\d{1,9})$")
_SEARCH_AGAIN = "the file looks truncated: run the search again"
_NO_OBSOLETE: Mapping[str, str | None] = MappingProxyType({})


@dataclass(frozen=True)
class TemplateHit:
    """One aligned chain of a template search; C columns, in which -1 stands for a gap and indices count from 0.

    `pdb_id` is lower case, `chain_id` the author's. `aligned_columns`: columns that pair two residues (as the search tool
    counts them). `sum_probs`: HHsearch's expected number of correctly aligned residues, None from hmmsearch.
    `query` and `hit_sequence` are upper case with '-' for a gap. Of HHsearch, both are the C aligned columns. Of hmmsearch,
    `query` is the whole query (C columns), and `hit_sequence` also holds the residues inserted between its columns, so
    that without its gaps it is a contiguous piece of the chain in both cases. `index` is the rank in the file, from 1.
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


def is_search_result(name: str) -> bool:
    """Whether a file of that name, gzipped or not, holds template hits: any .hhr, and hmm_output.sto (hmmsearch)."""
    name = name.removesuffix(".gz")
    return not name.startswith(".") and (name.endswith(".hhr") or name == "hmm_output.sto")


def parse_search_result(path: str | Path, query: str, data: bytes | None = None) -> list[TemplateHit]:
    """The hits of a file that `is_search_result` knows by its name; `query` and `data` as for the parsers below.

    An empty hmm_output.sto has none: that is what hmmsearch leaves if it finds nothing.
    """
    if Path(path).name.removesuffix(".gz").endswith(".hhr"):
        return parse_hhr(path, data)
    empty = data == b"" if data is not None else Path(path).is_file() and Path(path).stat().st_size == 0
    return [] if empty else parse_hmmsearch(path, data, query=query)


def parse_hhr(path: str | Path, data: bytes | None = None) -> list[TemplateHit]:
    """The hits of an HHsearch result (.hhr), in its order. An empty list where the search found nothing.

    `data`: the file's bytes, if they were read already; `path` then names them in messages.
    Raises FileFormatError (file and line) for a file that is not .hhr or is truncated, and for a hit whose blocks
    contradict each other, its numbering or its `Aligned_cols`.
    """
    lines = _lines(path, data)
    if not lines[0].startswith("Query"):
        raise FileFormatError(path, "not an HHsearch result: its first line must start with 'Query'; run it again", 1)
    table = next((k for k, line in enumerate(lines) if line.lstrip().startswith("No Hit")), None)
    if table is None:
        raise FileFormatError(path, f"no table of hits ('No Hit …'); {_SEARCH_AGAIN}", len(lines))
    starts = [k for k, line in enumerate(lines) if _HHR_HIT.match(line)]
    head = lines[table + 1 : starts[0] if starts else len(lines)]
    listed = sum(_HHR_TABLE_ROW.match(line) is not None for line in head)
    if listed != len(starts):
        raise FileFormatError(
            path, f"the table lists {listed} hits, {len(starts)} alignments follow; {_SEARCH_AGAIN}", len(lines)
        )
    return [_hhr_hit(path, lines, start, end) for start, end in pairwise([*starts, len(lines)])]


def _hhr_hit(path: str | Path, lines: list[str], start: int, end: int) -> TemplateHit:
    """The hit in lines[start:end], which begin with 'No <rank>'."""
    if end - start < 3 or not lines[start + 1].startswith(">"):
        raise FileFormatError(path, f"no '>name' after '{lines[start].strip()}'; {_SEARCH_AGAIN}", min(start + 2, end))
    name = lines[start + 1][1:].rstrip()
    chain = _CHAIN.match(name)
    if chain is None:
        raise FileFormatError(
            path,
            f"'{name[:30]}' does not start with a PDB chain such as 1ABC_A; search a database of PDB chains (pdb70)",
            start + 2,
        )
    scores = _HHR_SCORES.match(lines[start + 2])
    if scores is None:
        raise FileFormatError(path, f"expected 'Probab=… Aligned_cols=… Sum_probs=…'; {_SEARCH_AGAIN}", start + 3)
    rows: dict[tuple[str, bool], _Row] = {}
    for number, line in enumerate(lines[start + 3 : end], start + 4):
        if not line.startswith(("Q ", "T ")) or line[2:].startswith("ss_"):
            continue
        found = _HHR_ROW.match(line)
        if found is None:
            raise FileFormatError(path, f"a broken alignment row ('{line[:24].rstrip()}'); {_SEARCH_AGAIN}", number)
        side, label, first, letters, last = found.groups()
        # Next to the consensus there may be several sequences of a side: the first one is the master.
        row = rows.setdefault((side, label == "Consensus"), _Row(label))
        if row.label == label:
            row.append(path, number, int(first), letters.upper(), int(last))
    if ("Q", False) not in rows or ("T", False) not in rows:
        raise FileFormatError(path, f"hit '{chain.group()}' has no alignment rows; {_SEARCH_AGAIN}", end)
    query, hit = rows["Q", False], rows["T", False]
    widths = {tuple(map(len, row.chunks)) for row in rows.values()}
    if len(widths) > 1:
        message = (
            f"hit '{chain.group()}': the rows of its blocks differ in number or width {sorted(widths)}; {_SEARCH_AGAIN}"
        )
        raise FileFormatError(path, message, query.lines[-1])
    aligned = int(scores.group(1))
    consensus = rows.get(("Q", True), query), rows.get(("T", True), hit)
    paired = int(np.logical_and(*(row.indices() >= 0 for row in consensus)).sum())
    # A sequence may lack residues of its own consensus, so that without consensus rows fewer pairs are right.
    if paired > aligned or (paired < aligned and len(rows) == 4):
        message = f"hit '{chain.group()}' has {paired} aligned columns, Aligned_cols says {aligned}; {_SEARCH_AGAIN}"
        raise FileFormatError(path, message, start + 3)
    try:
        sum_probs = float(scores.group(2))
    except ValueError as error:
        raise FileFormatError(path, f"Sum_probs={scores.group(2)} is no number; run it again", start + 3) from error
    rank, (pdb_id, chain_id) = int(lines[start].split()[1]), chain.groups()
    return TemplateHit(
        rank, name, pdb_id.lower(), chain_id, aligned, sum_probs,
        query.letters(), hit.letters(), query.indices(), hit.indices(),
    )  # fmt: skip


@dataclass
class _Row:
    """One sequence of a hit, gathered from its blocks: the master's, or the consensus, where '~' and '.' stand for weakly
    conserved residues."""

    label: str
    start: int | None = None  # number of its first residue, from 1
    chunks: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    next: int | None = None

    def append(self, path: str | Path, line: int, first: int, letters: str, last: int) -> None:
        """Add a block's piece, numbered first..last; its numbering must be its own and follow on the last piece's."""
        residues = len(letters) - letters.count("-")
        if self.label != "Consensus" and not letters.replace("-", "A").isalpha():
            raise FileFormatError(path, f"'{self.label}' holds '.' or '~', which no sequence does; mend the row", line)
        if residues:
            if first < 1 or last - first + 1 != residues:
                message = (
                    f"'{self.label}' is numbered {first} to {last} but has {residues} residues; run the search again"
                )
                raise FileFormatError(path, message, line)
            if self.next is not None and first != self.next:
                message = f"'{self.label}' goes on at residue {first}, expected {self.next}; run the search again"
                raise FileFormatError(path, message, line)
            self.start, self.next = first if self.start is None else self.start, last + 1
        self.chunks.append(letters)
        self.lines.append(line)

    def letters(self) -> str:
        return "".join(self.chunks)

    def indices(self) -> Int32[np.ndarray, " C"]:
        """Residue index (from 0) of each column, -1 for a gap."""
        return _indices(np.frombuffer(self.letters().encode(), "S1") != b"-", (self.start or 1) - 1)


def parse_hmmsearch(path: str | Path, data: bytes | None = None, *, query: str) -> list[TemplateHit]:
    """The hits of `hmmsearch -A` (Stockholm, usually hmm_output.sto) over pdb_seqres, in its order.

    `query`: the query's one-letter codes. The profile must have been built with one match state a residue of the query
    (hmmbuild --hand), which is what makes the alignment's match columns (upper case and '-') the query's positions. Chains
    described as nucleic acids ('mol:na') are skipped, though counted in `index`. `data` as in `parse_hhr`.

    Raises FileFormatError (file and line) for a file that is not Stockholm, is truncated or empty, and for a hit whose
    match columns are not the query's, whose name is no 'chain/first-last', or whose residues are not first..last.
    """
    lines = _lines(path, data)
    if not lines[0].startswith("# STOCKHOLM"):
        raise FileFormatError(
            path, "not a Stockholm file: its first line must be '# STOCKHOLM 1.0'; run hmmsearch again", 1
        )
    end = next((k for k, line in enumerate(lines) if line.rstrip() == "//"), None)
    if end is None:
        raise FileFormatError(path, f"no '//' at the end; {_SEARCH_AGAIN}", len(lines))
    if more := next((k for k in range(end + 1, len(lines)) if lines[k].strip()), None):
        raise FileFormatError(path, "text after '//': keep one alignment a file and split the others off", more + 1)
    chunks: dict[str, list[str]] = {}
    line_of_hit: dict[str, int] = {}
    descriptions: dict[str, str] = {}
    for number, line in enumerate(lines[:end], 1):
        words = line.split(maxsplit=3)
        if line.startswith("#=GS"):
            if len(words) == 4 and words[2] == "DE":
                descriptions[words[1]] = words[3]
        elif words and not line.startswith("#"):
            if len(words) != 2:
                raise FileFormatError(
                    path, f"expected 'name residues', found '{line[:30]}'; run hmmsearch again", number
                )
            chunks.setdefault(words[0], []).append(words[1])
            line_of_hit.setdefault(words[0], number)
    return [
        _hmmsearch_hit(path, line_of_hit[name], rank, name, "".join(parts), query)
        for rank, (name, parts) in enumerate(chunks.items(), 1)
        if not re.search(r"\bmol:(?!protein\b)", descriptions.get(name, ""))
    ]


def _hmmsearch_hit(path: str | Path, line: int, rank: int, name: str, letters: str, query: str) -> TemplateHit:
    found = _HMM_NAME.match(name)
    if found is None:
        message = f"'{name}' is no PDB chain with a range such as 1abc_A/1-99; search pdb_seqres with hmmsearch -A"
        raise FileFormatError(path, message, line)
    pdb_id, chain_id, first, last = found.groups()
    codes = np.frombuffer(letters.encode("ascii", "replace"), np.uint8)
    upper, lower = (codes >= ord("A")) & (codes <= ord("Z")), (codes >= ord("a")) & (codes <= ord("z"))
    gap = codes == ord("-")
    if (illegal := np.flatnonzero(~(upper | lower | gap | (codes == ord("."))))).size:
        raise FileFormatError(
            path, f"illegal character {letters[illegal[0]]!r} in hit '{name}'; run hmmsearch again", line
        )
    if (columns := int((upper | gap).sum())) != len(query):
        message = (
            f"hit '{name}' has {columns} match columns, the query {len(query)} residues; "
            f"build the profile on this query with hmmbuild --hand"
        )
        raise FileFormatError(path, message, line)
    if (count := int((upper | lower).sum())) != int(last) - int(first) + 1:
        message = f"hit '{name}' has {count} residues, its range says {int(last) - int(first) + 1}; run hmmsearch again"
        raise FileFormatError(path, message, line)
    indices = _indices(upper | lower, int(first) - 1)[upper | gap]
    # Residues before the first match pair with nothing; without them `pairs` counts from the first aligned residue.
    kept = upper | gap | (lower & np.logical_or.accumulate(upper))
    sequence = codes[kept].tobytes().decode().upper()
    return TemplateHit(
        rank, f"{pdb_id}_{chain_id}", pdb_id.lower(), chain_id, int(upper.sum()), None,
        query, sequence, np.arange(len(query), dtype=np.int32), indices,
    )  # fmt: skip


def parse_obsolete(path: str | Path, data: bytes | None = None) -> dict[str, str | None]:
    """The PDB's obsolete.dat: withdrawn entry -> the entry that stands for it now, None where there is none; lower case.

    Chains of replacements are followed to their end. Columns 20:24 hold the withdrawn entry, 29:33 its first successor.
    Raises FileFormatError for a file without 'OBSLTE' records, a record cut short, a successor that leads back to itself.
    """
    lines = _lines(path, data)
    direct: dict[str, str | None] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.startswith("OBSLTE"):
            old, new = line[20:24].strip().lower(), line[29:33].strip().lower()
            if len(old) != 4 or len(new) not in (0, 4):
                raise FileFormatError(
                    path, "an OBSLTE record without a PDB id in columns 21-24; download it again", number
                )
            direct[old], line_of[old] = new or None, number
    if not direct:
        raise FileFormatError(path, "no 'OBSLTE' records; download obsolete.dat again")
    final: dict[str, str | None] = {}
    for old, successor in direct.items():
        seen = {old}
        while successor is not None and successor in direct:
            if successor in seen:
                message = f"the successors of '{old}' lead back to '{successor}'; mend the record"
                raise FileFormatError(path, message, line_of[old])
            seen.add(successor)
            successor = direct[successor]
        final[old] = successor
    return final


class Rejection(Enum):
    """Why a hit is not used as a template; the value is for logs."""

    OBSOLETE = "the entry was withdrawn without a successor"
    SAME_ENTRY = "the query's own entry"
    UNKNOWN_DATE = "release date unknown"
    TOO_RECENT = "released too late"
    LOW_COVERAGE = "covers too little of the query"
    DUPLICATE_OF_QUERY = "(nearly) the query itself"
    TOO_SHORT = "too few residues"
    DUPLICATE_CHAIN = "another chain of the entry with the same alignment is there"


@dataclass(frozen=True)
class HitLimits:
    """Limits of the supplement 1.2.3, with AF2's values.

    `max_date`: no template released later. `days_before_query`: how much earlier than the query a template must have been
    released, in days (AF2: 60, since entries of one study appear weeks apart); at least 1, so that it is always before.
    `min_coverage`: aligned columns over the query's length must exceed it. `max_query_fraction`: a hit that is a piece of
    the query must not exceed this fraction of its length. `min_residues` of the hit. `drop_duplicate_chains`: keep one of
    several chains of an entry that have the same residues in the same columns (AF2 keeps all).
    """

    max_date: date | None = None
    days_before_query: int = 60
    min_coverage: float = 0.1
    max_query_fraction: float = 0.95
    min_residues: int = 10
    drop_duplicate_chains: bool = False

    def __post_init__(self) -> None:
        if self.days_before_query < 1:
            raise UserError(f"days_before_query is {self.days_before_query}; give 1 or more, else the query leaks")

    def last_date(self, query_release_date: date | None) -> date | None:
        """The last allowed release date for a query that was released then (None: a query to predict)."""
        before = None if query_release_date is None else query_release_date - timedelta(self.days_before_query)
        return min((limit for limit in (self.max_date, before) if limit is not None), default=None)


def reject_date(release_date: date | None, last_date: date | None) -> Rejection | None:
    """None if released by `last_date` (None: no limit). An unknown date under a limit is a rejection: it might leak."""
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
    """What the filters left, best first, and what they rejected, in the same order, with the reason."""

    kept: tuple[TemplateHit, ...]
    rejected: tuple[tuple[TemplateHit, Rejection], ...]

    def counts(self) -> dict[Rejection, int]:
        """Number of hits rejected for each reason that occurred."""
        return dict(Counter(reason for _, reason in self.rejected))


@runtime_checkable
class ReleaseDates(Protocol):
    """Release dates by lower-case PDB id; a dictionary is one, and so is what reads a file when it is asked."""

    def __contains__(self, pdb_id: object, /) -> bool:
        """Whether the entry is there."""

    def get(self, pdb_id: str, /) -> date | None:
        """Its release date; None if that is not known."""


def select_hits(
    hits: list[TemplateHit],
    query: str,
    release_dates: ReleaseDates,
    limits: HitLimits,
    *,
    query_release_date: date | None = None,
    query_pdb_id: str | None = None,
    obsolete: Mapping[str, str | None] = _NO_OBSOLETE,
) -> HitSelection:
    """All filters in turn on all hits, sorted by falling `sum_probs` (file order among equals and for hmmsearch).

    `query`: one-letter codes. `release_dates`: by lower-case PDB id. `query_release_date` and `query_pdb_id`: of a query of
    known structure (training). `obsolete` (`parse_obsolete`) replaces withdrawn entries that `release_dates` does not
    list; the hits kept carry the new `pdb_id`. A hit is given the first reason that applies, in the order of `Rejection`.
    """
    last_date = limits.last_date(query_release_date)
    kept: list[TemplateHit] = []
    rejected: list[tuple[TemplateHit, Rejection]] = []
    seen: set[tuple[str, str, bytes, bytes]] = set()
    for hit in sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)):
        pdb_id = hit.pdb_id if hit.pdb_id in release_dates else obsolete.get(hit.pdb_id, hit.pdb_id)
        if pdb_id is None:
            rejected.append((hit, Rejection.OBSOLETE))
            continue
        hit = replace(hit, pdb_id=pdb_id)
        alignment = (pdb_id, hit.hit_sequence, hit.indices_query.tobytes(), hit.indices_hit.tobytes())
        if query_pdb_id is not None and pdb_id == query_pdb_id.lower():
            reason: Rejection | None = Rejection.SAME_ENTRY
        else:
            # A date may have to be read from a file: without a limit it is not asked for.
            released = None if last_date is None else release_dates.get(pdb_id)
            reason = reject_date(released, last_date) or reject_alignment(hit, query, limits)
        if reason is None and limits.drop_duplicate_chains and alignment in seen:
            reason = Rejection.DUPLICATE_CHAIN
        if reason is None:
            seen.add(alignment)
            kept.append(hit)
        else:
            rejected.append((hit, reason))
    return HitSelection(tuple(kept), tuple(rejected))


def _indices(is_residue: np.ndarray, first: int) -> Int32[np.ndarray, " C"]:
    """`first`, first + 1, … at residues, -1 elsewhere."""
    return np.where(is_residue, first - 1 + np.cumsum(is_residue), -1).astype(np.int32)


def _lines(path: str | Path, data: bytes | None) -> list[str]:
    text = read_bytes(path) if data is None else check_text(path, unpack(path, data))
    return [line.decode() for line in text.splitlines()]
