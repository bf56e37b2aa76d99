"""Structure files of small chains without a listed sequence: an ideal backbone, whose peptide bonds are 1.3 Å long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.builders.mmcif import COLUMNS, atom

_ATOMS = (("N", 0.0, 0.0), ("CA", 1.2, 0.8), ("C", 2.5, 0.0))
"""Name, place along the chain and beside it. The next N follows at 3.8 Å."""


@dataclass(frozen=True)
class Residue:
    """A residue at the `at`-th place along its chain; chains with another `row` are far away."""

    name: str
    number: int
    at: float
    code: str = ""
    chain: str = "A"
    het: bool = False
    row: int = 0
    label: str = ""
    """The mmCIF's label_asym_id; the chain's name if it is empty."""
    altloc: str = ""
    occupancy: float = 1.0
    atoms: tuple[tuple[str, float, float], ...] = _ATOMS


def chain(names: Iterable[str], first: int = 1, **common: object) -> list[Residue]:
    """Residues of successive numbers and places."""
    return [replace(Residue(name, first + k, k), **common) for k, name in enumerate(names)]  # type: ignore[arg-type]


def ligand(name: str, number: int, **common: object) -> Residue:
    """A HETATM far from all chains."""
    return replace(Residue(name, number, 40, het=True, row=9), **common)  # type: ignore[arg-type]


def pdb_text(residues: Iterable[Residue | str], header: str = "") -> str:
    """PDB text; strings, such as TER, are lines of their own."""
    lines = []
    for residue in residues:
        if isinstance(residue, str):
            lines.append(residue)
            continue
        for name, x, y in residue.atoms:
            record, number = ("HETATM" if residue.het else "ATOM"), f"{residue.number:4d}{residue.code or ' '}"
            place = f"{3.8 * residue.at + x:8.3f}{y:8.3f}{20 * residue.row:8.3f}"
            lines.append(
                f"{record:6}{len(lines) + 1:5d}  {name:<3}{residue.altloc or ' '}{residue.name:>3} {residue.chain:1}{number}"
                f"   {place}{residue.occupancy:6.2f} 50.00          {name[0]:>2}"
            )
    return header + "\n".join(lines) + "\nEND\n"


def mmcif_text(residues: Iterable[Residue]) -> str:
    """mmCIF text with nothing but atoms."""
    rows = [
        atom(
            *(name, residue.name, residue.number, round(3.8 * residue.at + x, 3)),
            group_PDB="HETATM" if residue.het else "ATOM",
            label_asym_id=residue.label or residue.chain,
            auth_asym_id=residue.chain,
            auth_seq_id=residue.number,
            pdbx_PDB_ins_code=residue.code or "?",
            label_alt_id=residue.altloc or ".",
            occupancy=residue.occupancy,
            Cartn_y=y,
            Cartn_z=20 * residue.row,
        )
        for residue in residues
        for name, x, y in residue.atoms
    ]
    return "data_T\nloop_\n" + "".join(f"_atom_site.{column}\n" for column in COLUMNS) + "\n".join(rows) + "\n"
