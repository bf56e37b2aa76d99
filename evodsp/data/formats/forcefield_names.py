"""Residues and atoms of simulation and modelling programs under their names in the PDB: HIE is HIS, CD of ILE is CD1.

The names are in `evodsp/geometry/tables` (`forcefield_names.csv`, `forcefield_atoms.csv`). Some are other monomers in the PDB
(HSE is homoserine there, CHARMM's histidine elsewhere), so a residue's atoms decide.
"""

from __future__ import annotations

from collections.abc import Iterable

from evodsp.geometry.residues import (
    MONOMER_LETTERS,
    RESTYPE_1TO3,
    RESTYPE_NAME_TO_ATOM14_NAMES,
    RESTYPES,
    monomer_letter,
    read_table,
)

AMINO_ACID_OF: dict[str, str] = {
    name: row["residue"] for row in read_table("forcefield_names.csv") for name in row["names"].split()
}
"""The amino acid of each name of a force field."""
HEAVY_ATOMS: dict[str, frozenset[str]] = {
    name: frozenset(filter(None, RESTYPE_NAME_TO_ATOM14_NAMES[name])) | {"OXT"}
    for name in map(RESTYPE_1TO3.__getitem__, RESTYPES)
}
"""The heavy atoms that each amino acid may have."""
_ALIASES = [tuple(row.values()) for row in read_table("forcefield_atoms.csv")]
_AMBIGUOUS = frozenset({"N", "CA", "C", "O", "OXT", "CB", "CG"})
"""Atoms that do not tell histidine from homoserine, nor glutamate from glutamine."""


def is_heavy(atom: str) -> bool:
    """Whether an atom of an amino acid is no hydrogen, by its name."""
    return not atom.lstrip("0123456789").startswith(("H", "D"))


def listed_name(name: str) -> str:
    """The PDB's name of a monomer in a list of residues, where no atoms can tell."""
    return name if name in MONOMER_LETTERS else AMINO_ACID_OF.get(name, name)


def letters_of(name: str) -> set[str]:
    """The letters that a monomer's name may stand for, in the PDB and in force fields."""
    return {monomer_letter(name), monomer_letter(AMINO_ACID_OF.get(name, name))}


def amino_acid_name(name: str, atoms: Iterable[str]) -> str:
    """The PDB's name of a residue with these atoms; the same name if no force field has it, or the atoms do not fit."""
    if (amino_acid := AMINO_ACID_OF.get(name)) is None:
        return name
    heavy = {atom_names(amino_acid, atoms).get(atom, atom) for atom in atoms if is_heavy(atom)}
    means_another = name in MONOMER_LETTERS and MONOMER_LETTERS[name] != monomer_letter(amino_acid)
    fits = heavy <= HEAVY_ATOMS[amino_acid] and not (means_another and heavy <= _AMBIGUOUS)
    return amino_acid if fits else name


def atom_names(residue: str, atoms: Iterable[str]) -> dict[str, str]:
    """The PDB's names of those atoms of an amino acid that have another one."""
    if residue not in HEAVY_ATOMS:
        return {}
    present, found = set(atoms), {}
    for of_residue, atom, name in _ALIASES:
        if of_residue in (residue, "any") and atom in present and name not in present:
            found[atom] = name
            present.add(name)
    return found
