"""The alphabet of residues: letters, three-letter names, integer codes, and how sequences are encoded and decoded.

Codes are AlphaFold2's: the 20 amino acids are 0..19 in the order of `RESTYPES`, X (unknown) is 20, the gap of an alignment
21, the mask token of the masked-MSA loss 22. Every array of residues uses these codes; files with another numbering are
translated when they are parsed. This module imports numpy only.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int8, Int32

from evodsp.errors import UserError

RESTYPE_1TO3: dict[str, str] = {
    "A": "ALA", "R": "ARG", "N": "ASN", "D": "ASP", "C": "CYS", "Q": "GLN", "E": "GLU", "G": "GLY", "H": "HIS", "I": "ILE",
    "L": "LEU", "K": "LYS", "M": "MET", "F": "PHE", "P": "PRO", "S": "SER", "T": "THR", "W": "TRP", "Y": "TYR", "V": "VAL",
}  # fmt: skip
"""Three-letter names of the 20 amino acids. X has no entry here; `residue_name` names it."""
RESTYPES: tuple[str, ...] = tuple(RESTYPE_1TO3)
RESTYPES_WITH_X: tuple[str, ...] = (*RESTYPES, "X")
RESTYPE_ORDER: dict[str, int] = {letter: code for code, letter in enumerate(RESTYPES_WITH_X)}
"""Code of each letter, X = 20 included."""

UNKNOWN, GAP, MASK = 20, 21, 22
LETTERS_WITH_X = 21
"""Number of residue types: the amino acids and X."""
LETTERS_WITH_GAP = 22
"""Number of letters of an alignment: the amino acids, X and the gap."""
LETTERS_WITH_MASK = 23
"""Number of letters of a masked alignment: the amino acids, X, the gap and the mask token."""

_AMBIGUOUS = {"B": "D", "Z": "E", "U": "C"}
ALIGNMENT_CODES: dict[str, int] = {
    letter: RESTYPE_ORDER.get(_AMBIGUOUS.get(letter, letter), UNKNOWN) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
}
"""Code of each upper-case letter of an alignment. Ambiguous ones as in AF2's HHblits table: B is D, Z is E, U is C; J and O
are X."""

_ILLEGAL = -1
_ENCODE = np.full(256, _ILLEGAL, np.int8)
for _letter, _code in (*ALIGNMENT_CODES.items(), ("-", GAP)):
    _ENCODE[[ord(_letter), ord(_letter.lower())]] = _code
_ENCODE_SEQUENCE = np.full(256, UNKNOWN, np.int32)
_ENCODE_SEQUENCE[np.frombuffer("".join(RESTYPES).encode(), np.uint8)] = np.arange(len(RESTYPES))
_DECODE = np.frombuffer("".join((*RESTYPES_WITH_X, "-")).encode(), np.uint8)


def encode(letters: str) -> Int8[np.ndarray, " L"]:
    """Codes of the letters of an alignment, either case, '-' for a gap. `ALIGNMENT_CODES` defines the codes of ambiguous
    letters.

    Raises UserError, with the position, for any other character.
    """
    codes = _ENCODE[np.frombuffer(letters.encode("ascii", "replace"), np.uint8)]
    if (illegal := np.flatnonzero(codes == _ILLEGAL)).size:
        raise UserError(f"letter '{letters[illegal[0]]}' at position {illegal[0] + 1} is no amino acid; write X")
    return codes


def decode(residues: Int8[np.ndarray, " L"]) -> str:
    """One-letter codes, '-' for a gap: the inverse of `encode` except for ambiguous letters."""
    return _DECODE[residues].tobytes().decode()


def encode_sequence(letters: str) -> Int32[np.ndarray, " L"]:
    """Residue types (`aatype`) of a sequence: every letter that is not one of the 20 amino acids is X, as in AF2.

    Unlike `encode`, which reads U in an alignment as C, this makes selenocysteine (U) an unknown residue.
    """
    return _ENCODE_SEQUENCE[np.frombuffer(letters.encode("latin-1", "replace"), np.uint8)]


def residue_name(letter: str) -> str:
    """Three-letter name of a one-letter code; UNK for X and every other letter."""
    return RESTYPE_1TO3.get(letter, "UNK")
