"""The table of `evodsp score`: a row for each structure, the columns of both kinds, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evodsp.data.records import CHAINS, COMPLEXES, Kind
from evodsp.files import write_rows


@dataclass(frozen=True)
class StructureScores:
    """Scores of a predicted structure against the experiment; a chain is a complex of one. `COLUMNS` says what the fields mean.

    None: no value. Residues that are not predicted count as wrong, except those of single chains, which are of type X.
    """

    name: str
    split: str
    residues: int
    resolved: int
    plddt: float | None
    lddt_ca: float
    rmsd: float | None = None
    gdt_ts: float | None = None
    tm_score: float | None = None
    chains: int | None = None
    interfaces: int | None = None
    dockq: float | None = None
    fnat: float | None = None
    interface_lddt_ca: float | None = None
    clashes: int | None = None
    iptm: float | None = None
    confidence: float | None = None
    missing: str | None = None
    mapping: str | None = None
    mapped_by: str | None = None
    nearest: str | None = None
    nearest_identity: float | None = None
    nearest_coverage: float | None = None
    nearest_dockq: float | None = None
    nearest_interface_lddt_ca: float | None = None
    nearest_lddt_ca: float | None = None
    nearest_gdt_ts: float | None = None
    better_by: float | None = None


COLUMNS = (
    ("name", "name", "", "name of the structure (chains: and of the chain)"),
    ("split", "split", "", "train: the model was trained on this structure; held-out: it was not"),
    ("residues", "residues", "d", "its residues"),
    ("resolved", "", "d", "those with a CA in the experiment, which are compared"),
    ("plddt", "pLDDT", ".1f", "the model's confidence in its prediction, 0 to 100 (mean; above 70: confident)"),
    ("lddt_ca", "lDDT-CA", ".3f", "how well distances to residues within 15 Å are reproduced, 0 to 1"),
    ("rmsd", "RMSD Å", ".2f", "typical CA displacement after superposition, in Å (lower is better, below 3: close)"),
    ("gdt_ts", "GDT-TS", ".3f", "fraction of residues within 1, 2, 4 and 8 Å of their place, averaged, 0 to 1"),
    ("tm_score", "TM-score", ".3f", "similarity of the whole fold, 0 to 1 (above 0.5: same fold, 0.2: chance)"),
    ("chains", "chains", "d", "chains of the structure"),
    ("interfaces", "interfaces", "d", "pairs of chains in contact: with heavy atoms within 5 Å"),
    ("dockq", "DockQ", ".3f", "quality of an interface, mean over all, 0 to 1 (0.23: acceptable, 0.49: medium, 0.8: high)"),
    ("fnat", "fnat", ".3f", "share of the contacts that the prediction has, 0 to 1"),
    ("interface_lddt_ca", "iLDDT-CA", ".3f", "how well distances up to 15 Å between chains are reproduced, 0 to 1"),
    ("clashes", "clashes", "d", "pairs of heavy atoms of different predicted chains closer than 2 Å (real chains: none)"),
    ("iptm", "ipTM", ".3f", "the model's confidence in the interfaces, 0 to 1"),
    ("confidence", "confidence", ".3f", "0.8 ipTM + 0.2 pTM"),
    ("missing", "", "", "chains that are not predicted"),
    ("mapping", "mapping", "", "chains of the structure and of the prediction; - is a missing one, which counts as wrong"),
    ("mapped_by", "mapped by", "", "what decides which chain is which: sequence, or between identical copies DockQ or RMSD"),
    ("nearest", "nearest", "", "the training structure whose sequences have the highest alignment scores with these"),
    ("nearest_identity", "identity", ".3f", "share of the residues, paired by the alignments, that are identical, 0 to 1"),
    ("nearest_coverage", "coverage", ".3f", "share of the residues that are paired, 0 to 1"),
    ("nearest_dockq", "copy DockQ", ".3f", "DockQ of a copy of that training structure"),
    ("nearest_interface_lddt_ca", "copy iLDDT", ".3f", "iLDDT-CA of that copy"),
    ("nearest_lddt_ca", "copy lDDT", ".3f", "lDDT-CA of that copy"),
    ("nearest_gdt_ts", "copy GDT", ".3f", "GDT-TS of that copy"),
    ("better_by", "better by", "+.3f", "lDDT-CA (of complexes: iLDDT-CA) of the prediction less that of the copy"),
)  # fmt: skip
"""The field of a row, its heading ('': only files have it), the format of its numbers ('': texts), and what it means."""
_ONLY: dict[Kind, tuple[str, ...]] = {
    CHAINS: ("rmsd", "gdt_ts", "tm_score", "nearest_gdt_ts"),
    COMPLEXES: (
        *("chains", "interfaces", "dockq", "fnat", "interface_lddt_ca", "clashes", "iptm", "confidence"),
        *("missing", "mapping", "mapped_by", "nearest_dockq", "nearest_interface_lddt_ca"),
    ),
}
"""The fields that only these have."""


def columns_of(kind: Kind, beside_copy: bool = False) -> list[str]:
    """The fields of chains or of complexes. `beside_copy`: with those of a copy of the nearest training structure."""
    others = {name for one, names in _ONLY.items() if one != kind for name in names}
    names = [name for name, *_ in COLUMNS if name not in others]
    return names if beside_copy else names[: names.index("nearest")]


def table(names: Sequence[str], rows: Sequence[StructureScores], unit: str) -> str:
    """The fields as text, a line for each row, then a line of explanation for each column. Those without a value are left out.

    `unit`: what a row is, such as chain.
    """
    shown = [
        (name, unit if name == "name" else heading, style, meaning)
        for name, heading, style, meaning in COLUMNS
        if heading and name in names and any(getattr(row, name) is not None for row in rows)
    ]
    cells = [[heading for _, heading, _, _ in shown]]
    cells += [[_cell(getattr(row, name), style) for name, _, style, _ in shown] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [style == "" for _, _, style, _ in shown]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, texts, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    longest = max(map(len, cells[0]))
    return "\n".join([*lines, "", *(f"{heading:<{longest}}  {meaning}" for _, heading, _, meaning in shown)])


def _cell(value: object, style: str) -> str:
    return "–" if value is None or value == "" else format(value, style)


def write_scores(names: Sequence[str], rows: Iterable[StructureScores], unit: str, path: Path) -> None:
    """Write the fields of the rows by `write_rows`. `unit`: what a row is, such as chain, and the heading of its name."""
    headings = [unit if name == "name" else name for name in names]
    write_rows(headings, [{**vars(row), unit: row.name} for row in rows], path)
