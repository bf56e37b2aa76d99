"""The derived tables of residues against AlphaFold2's, and their inner consistency."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from Bio.Data.PDBData import protein_letters_3to1_extended

from evodsp.errors import UserError
from evodsp.geometry import residues
from evodsp.geometry.residues import (
    MONOMER_LETTERS,
    RESTYPE_1TO3,
    decode,
    encode,
    encode_sequence,
    monomer_letter,
    residue_name,
)
from tests.shared import load

EXACT = [
    "restype_atom14_to_rigid_group", "restype_atom14_mask", "restype_atom14_rigid_group_positions",
    "restype_atom37_mask", "restype_atom37_rigid_group_positions",
    "chi_pi_periodic", "chi_angles_atom_indices", "renaming_matrices",
]  # fmt: skip
CLOSE = ["restype_rigid_group_default_frame", "atom14_dists_lower_bound", "atom14_dists_upper_bound"]


@pytest.mark.parametrize("name", EXACT + CLOSE)
def test_table_equals_alphafold(golden: Path, name: str) -> None:
    """Catches a wrong digit, atom or group in the packaged tables, a frame with a wrong axis, sign or parent, and bounds of
    distances with a tolerance of 15 deviations or without the angle's deviation."""
    expected, tolerance = load(golden / "residue_constants.npz")[name], 1e-6 if name in CLOSE else 0
    np.testing.assert_allclose(getattr(residues, name.upper()), expected, rtol=tolerance, atol=tolerance)


def test_chi_mask_and_atom_names_equal_alphafold(golden: Path) -> None:
    """Catches two atoms exchanged, which no test of shapes would show, and chi angles of X."""
    expected = load(golden / "residue_constants.npz")
    np.testing.assert_array_equal(residues.CHI_ANGLES_MASK[:20], expected["chi_angles_mask"])
    assert not residues.CHI_ANGLES_MASK[20].any()
    assert list(residues.ATOM_TYPES) == [name.decode() for name in expected["atom_types"]]


def test_index_maps_equal_alphafold(golden: Path) -> None:
    """The maps that features carry, over every residue type that the real chains have."""
    seen = set()
    for path in sorted(golden.glob("geometry_*.npz")):
        expected = load(path)
        aatype = expected["aatype"]
        seen.update(aatype.tolist())
        np.testing.assert_array_equal(residues.RESTYPE_ATOM14_TO_ATOM37[aatype], expected["residx_atom14_to_atom37"])
        np.testing.assert_array_equal(residues.RESTYPE_ATOM37_TO_ATOM14[aatype], expected["residx_atom37_to_atom14"])
        np.testing.assert_array_equal(residues.RESTYPE_ATOM14_MASK[aatype], expected["atom14_atom_exists"])
        np.testing.assert_array_equal(residues.RESTYPE_ATOM37_MASK[aatype], expected["atom37_atom_exists"])
    assert set(range(20)) <= seen


def test_numpy_only_at_import() -> None:
    """Catches an import of torch, which would slow down data-loading workers."""
    code = "import sys, evodsp.geometry.residues; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The alphabet of residues: AF2's order and codes, and what becomes of other letters.


def test_order_equals_alphafold(golden: Path) -> None:
    """Catches two residue types exchanged, which no test of shapes would show."""
    expected = load(golden / "residue_constants.npz")["restypes"]
    assert "".join(residues.RESTYPES) == b"".join(expected).decode()
    assert (residues.UNKNOWN, residues.GAP, residues.MASK) == (20, 21, 22)
    assert residues.RESTYPE_ORDER["X"] == residues.UNKNOWN
    assert [residue_name(letter) for letter in "AWX"] == ["ALA", "TRP", "UNK"]


def test_letters_of_alignments() -> None:
    """Catches HHblits' alphabetical order in place of AF2's, and ambiguous letters that all become X."""
    assert encode("ARNDCQEGHILKMFPSTWYVX-").tolist() == list(range(22))
    assert decode(encode("BZUJOX")) == "DECXXX"
    assert decode(encode("acdE-")) == "ACDE-"


@pytest.mark.parametrize(("letters", "shown"), [("AC1", "1"), ("AC.", "."), ("ACÅ", "Å"), ("AC\0", r"\x00")])
def test_other_characters_are_refused(letters: str, shown: str) -> None:
    """Catches a character that is silently encoded as a residue."""
    with pytest.raises(UserError, match=re.escape(f"letter '{shown}' at position 3")):
        encode(letters)


def test_letters_of_sequences() -> None:
    """Catches ambiguous letters encoded as in alignments: in a sequence they are X, as in AF2."""
    assert encode_sequence("ARNVX").tolist() == [0, 1, 2, 19, 20]
    assert set(encode_sequence("BZUJO*-aÅ").tolist()) == {20}


# One-letter codes of monomers, against those that AlphaFold2's alignments were made with.


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
