"""HHsearch results (.hhr): template hits over a database of PDB chains, such as pdb70."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from evodsp.data.templates.hits import CHAIN, TemplateHit, column_indices, of_chains
from evodsp.errors import FileFormatError
from evodsp.reading.text_files import lines_of

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
