"""The alphabet of residues: AF2's order and codes, and what becomes of other letters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from evodsp.errors import UserError
from evodsp.geometry import residues
from evodsp.geometry.residues import decode, encode, encode_sequence, residue_name
from tests.shared import load


def test_order_equals_alphafold(golden: Path) -> None:
    """Catches two residue types exchanged, which no test of shapes would show."""
    expected = load(golden / "residue_constants.npz")["restypes"]
    assert "".join(residues.RESTYPES) == b"".join(expected).decode()
    assert (residues.UNKNOWN, residues.GAP, residues.MASK) == (20, 21, 22)
    assert residues.RESTYPE_ORDER["X"] == residues.UNKNOWN


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


def test_three_letter_names() -> None:
    assert [residue_name(letter) for letter in "AWX"] == ["ALA", "TRP", "UNK"]


def test_numpy_only_at_import() -> None:
    """Catches an import of torch, which would slow down data-loading workers."""
    code = "import sys, evodsp.geometry.residues; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
