"""Results of template searches: HHsearch's (.hhr, over a database of PDB chains such as pdb70) and hmmsearch's
(Stockholm, usually hmm_output.sto, over pdb_seqres); and obsolete.dat, the PDB's list of the entries that were
withdrawn and of those that replaced them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from evodsp.data.formats.alignments import alignment_end
from evodsp.data.templates.hits import CHAIN, TemplateHit, column_indices, of_chains
from evodsp.errors import FileFormatError
from evodsp.reading.text_files import lines_of, text_of

_CHAIN = re.compile(CHAIN, re.IGNORECASE)
_HIT = re.compile(r"No +(\d{1,9})\s*$")
_TABLE_ROW = re.compile(r" *(\d+) +\S")
_SCORES = re.compile(r"Probab=.*\bAligned_cols=(\d{1,9})\b.*\bSum_probs=([-+.0-9eE]+)")
_ALIGNED_ROW = re.compile(r"([QT]) (\S+) +(\d{1,9}) ([A-Za-z~.-]+) +(\d{1,9}) \( *\d+\)\s*$")
_SEARCH_AGAIN = "the file looks truncated: run the search again"


def parse_hhr(path: str | Path, data: bytes | None = None) -> list[TemplateHit]:
    """The hits of an HHsearch result (.hhr), in the file's order; empty if the search found nothing.

    `data`: the file's bytes, if they were read already; `path` then names them in messages. Hits that are named as no
    PDB chain, such as AlphaFold's AF-P00750-F1-model_v4_A, are left out with a warning, but counted in `index`.
    Raises FileFormatError (file and line) for a file that is not .hhr or is truncated, and for a hit whose blocks
    contradict each other, the numbering or `Aligned_cols`.
    """
    lines = lines_of(path, data)
    if not lines[0].startswith("Query"):
        raise FileFormatError(path, "not an HHsearch result: its first line must start with 'Query'; run it again", 1)
    table = next((k for k, line in enumerate(lines) if line.lstrip().startswith("No Hit")), None)
    if table is None:
        raise FileFormatError(path, f"no table of hits ('No Hit …'); {_SEARCH_AGAIN}", len(lines))
    starts = [k for k, line in enumerate(lines) if _HIT.match(line)]
    head = lines[table + 1 : starts[0] if starts else len(lines)]
    listed = sum(_TABLE_ROW.match(line) is not None for line in head)
    if listed != len(starts):
        raise FileFormatError(
            path, f"the table lists {listed} hits, {len(starts)} alignments follow; {_SEARCH_AGAIN}", len(lines)
        )
    found = [_hit(path, lines, start, end) for start, end in pairwise([*starts, len(lines)])]
    return of_chains(path, found)


def _hit(path: str | Path, lines: list[str], start: int, end: int) -> TemplateHit | str:
    """The hit in lines[start:end], of which the first is 'No <rank>'; its name alone if it is no PDB chain."""
    if end - start < 3 or not lines[start + 1].startswith(">"):
        raise FileFormatError(path, f"no '>name' after '{lines[start].strip()}'; {_SEARCH_AGAIN}", min(start + 2, end))
    name = lines[start + 1][1:].rstrip()
    chain = _CHAIN.match(name)
    if chain is None:
        return name
    scores = _SCORES.match(lines[start + 2])
    if scores is None:
        raise FileFormatError(path, f"expected 'Probab=… Aligned_cols=… Sum_probs=…'; {_SEARCH_AGAIN}", start + 3)
    rows: dict[tuple[str, bool], _AlignedRow] = {}
    for number, line in enumerate(lines[start + 3 : end], start + 4):
        if not line.startswith(("Q ", "T ")) or line[2:].startswith("ss_"):
            continue
        found = _ALIGNED_ROW.match(line)
        if found is None:
            raise FileFormatError(path, f"a broken alignment row ('{line[:24].rstrip()}'); {_SEARCH_AGAIN}", number)
        side, label, first, letters, last = found.groups()
        # A side can have further sequences beside its consensus: the first one is the master.
        row = rows.setdefault((side, label == "Consensus"), _AlignedRow(label))
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
    # Aligned_cols counts the consensus. A sequence may lack residues of it, so without consensus rows fewer pairs are valid.
    if paired > aligned or (paired < aligned and len(rows) == 4):
        message = f"hit '{chain.group()}' has {paired} aligned columns, Aligned_cols says {aligned}; {_SEARCH_AGAIN}"
        raise FileFormatError(path, message, start + 3)
    try:
        sum_probs = float(scores.group(2))
    except ValueError as error:
        raise FileFormatError(path, f"Sum_probs={scores.group(2)} is not a number; run it again", start + 3) from error
    rank, (pdb_id, chain_id) = int(lines[start].split()[1]), chain.groups()
    return TemplateHit(
        rank, name, pdb_id.lower(), chain_id, aligned, sum_probs,
        query.letters(), hit.letters(), query.indices(), hit.indices(),
    )  # fmt: skip


@dataclass
class _AlignedRow:
    """One row of a hit, joined from its blocks: a sequence, or a consensus, in which '~' and '.' are weakly conserved."""

    label: str
    start: int | None = None  # number of the first residue, from 1
    chunks: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    next: int | None = None

    def append(self, path: str | Path, line: int, first: int, letters: str, last: int) -> None:
        """Add a block's piece, numbered first..last. The numbers must fit its residues and continue the previous piece."""
        residues = len(letters) - letters.count("-")
        if self.label != "Consensus" and not letters.replace("-", "A").isalpha():
            raise FileFormatError(
                path, f"'{self.label}' holds '.' or '~', which sequences do not have; correct the row", line
            )
        if residues:
            if first < 1 or last - first + 1 != residues:
                message = (
                    f"'{self.label}' is numbered {first} to {last} but has {residues} residues; run the search again"
                )
                raise FileFormatError(path, message, line)
            if self.next is not None and first != self.next:
                message = f"'{self.label}' continues at residue {first}, expected {self.next}; run the search again"
                raise FileFormatError(path, message, line)
            self.start, self.next = first if self.start is None else self.start, last + 1
        self.chunks.append(letters)
        self.lines.append(line)

    def letters(self) -> str:
        return "".join(self.chunks)

    def indices(self) -> Int32[np.ndarray, " C"]:
        """Residue index (from 0) of each column, -1 for a gap."""
        return column_indices(np.frombuffer(self.letters().encode(), "S1") != b"-", (self.start or 1) - 1)


_NAME = re.compile(rf"{CHAIN}/(\d{{1,9}})-(\d{{1,9}})$", re.IGNORECASE)


def parse_hmmsearch(
    path: str | Path, data: bytes | None = None, *, query: str, listed: str | None = None
) -> list[TemplateHit]:
    """The hits of `hmmsearch -A` (Stockholm, usually hmm_output.sto) over pdb_seqres, in the file's order.

    `query`: the query's one-letter codes. The profile must have been built with one match state per residue of the query
    (hmmbuild --hand): the alignment's match columns (upper case and '-') are then the query's positions. `listed`: the query
    with all monomers of residues that have several; a profile of that length is one of this query, too. Chains described as
    nucleic acids ('mol:na') are skipped, but counted in `index`; so are, with a warning, hits named as no PDB chain. `data`:
    as in `parse_hhr`.

    Raises FileFormatError (file and line) for a file that is not Stockholm, truncated or empty, and for a hit whose number of
    match columns is not the query's length, or whose residues are not first..last.
    """
    raw_lines = text_of(path, data).splitlines()
    lines = [line.decode() for line in raw_lines[: alignment_end(path, raw_lines, "run hmmsearch again")]]
    chunks: dict[str, list[str]] = {}
    line_of_hit: dict[str, int] = {}
    descriptions: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
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
    found = [
        _hit_of_row(path, line_of_hit[name], rank, name, "".join(parts), (query, listed or query))
        for rank, (name, parts) in enumerate(chunks.items(), 1)
        if not re.search(r"\bmol:(?!protein\b)", descriptions.get(name, ""))
    ]
    return of_chains(path, found)


def _hit_of_row(
    path: str | Path, line: int, rank: int, name: str, letters: str, queries: tuple[str, str]
) -> TemplateHit | str:
    """The hit; its name alone if it is no PDB chain."""
    found = _NAME.match(name)
    if found is None:
        return name
    pdb_id, chain_id, first, last = found.groups()
    codes = np.frombuffer(letters.encode("ascii", "replace"), np.uint8)
    upper, lower = (codes >= ord("A")) & (codes <= ord("Z")), (codes >= ord("a")) & (codes <= ord("z"))
    gap = codes == ord("-")
    if (illegal := np.flatnonzero(~(upper | lower | gap | (codes == ord("."))))).size:
        raise FileFormatError(
            path, f"illegal character {letters[illegal[0]]!r} in hit '{name}'; run hmmsearch again", line
        )
    columns = int((upper | gap).sum())
    query = next((query for query in queries if len(query) == columns), None)
    if query is None:
        message = (
            f"hit '{name}' has {columns} match columns, the query {len(queries[0])} residues; "
            f"build the profile on this query with hmmbuild --hand"
        )
        raise FileFormatError(path, message, line)
    if (count := int((upper | lower).sum())) != int(last) - int(first) + 1:
        message = f"hit '{name}' has {count} residues, its range says {int(last) - int(first) + 1}; run hmmsearch again"
        raise FileFormatError(path, message, line)
    indices = column_indices(upper | lower, int(first) - 1)[upper | gap]
    # Residues before the first match are not aligned. They are dropped, so that `pairs` counts from the first aligned one.
    kept = upper | gap | (lower & np.logical_or.accumulate(upper))
    sequence = codes[kept].tobytes().decode().upper()
    return TemplateHit(
        rank, f"{pdb_id}_{chain_id}", pdb_id.lower(), chain_id, int(upper.sum()), None,
        query, sequence, np.arange(len(query), dtype=np.int32), indices,
    )  # fmt: skip


def parse_obsolete(path: str | Path) -> dict[str, str | None]:
    """The PDB's obsolete.dat: withdrawn entry -> the entry that replaces it, or None; in lower case.

    Chains of replacements are followed to their end. Columns 20:24 hold the withdrawn entry, 29:33 its first successor.
    Raises FileFormatError for a file without 'OBSLTE' records, a record cut short, and successors that form a cycle.
    """
    lines = lines_of(path)
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
                message = f"the successors of '{old}' lead back to '{successor}'; correct the record"
                raise FileFormatError(path, message, line_of[old])
            seen.add(successor)
            successor = direct[successor]
        final[old] = successor
    return final
