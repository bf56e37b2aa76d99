"""One-letter codes of monomers, against those that AlphaFold2's alignments were made with."""

from __future__ import annotations

import pytest
from Bio.Data.PDBData import protein_letters_3to1_extended

from evodsp.geometry.residues import MONOMER_LETTERS, RESTYPE_1TO3, monomer_letter


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        ("PCA", "E"), ("DLE", "L"), ("DVA", "V"), ("DAL", "A"), ("DTR", "W"), ("MSE", "M"), ("SEP", "S"), ("HYP", "P"),
        ("SEC", "A"), ("PYL", "X"), ("UNK", "X"), ("CRO", "X"), ("HOH", "X"), ("", "X"), ("ASX", "B"), ("GLX", "Z"),
    ],
)  # fmt: skip
def test_letters_are_alphafolds(name: str, letter: str) -> None:
    """Catches Biopython's letters in place of AlphaFold2's: chains with PCA or D-amino acids did not fit their alignments."""
    assert monomer_letter(name) == letter


def test_the_table_is_whole() -> None:
    """Catches a table with lost lines, two letters of a name, or without the names of later dictionaries."""
    assert all(monomer_letter(name) == letter for letter, name in RESTYPE_1TO3.items())
    assert len(MONOMER_LETTERS) == 1517
    assert all(len(letter) == 1 and letter.isupper() and letter != "X" for letter in MONOMER_LETTERS.values())
    biopythons = {name.strip(): letter for name, letter in protein_letters_3to1_extended.items() if letter != "X"}
    differing = {name for name, letter in biopythons.items() if monomer_letter(name) != letter}
    assert "PCA" in differing
    assert len(differing) <= 12
