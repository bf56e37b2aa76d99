"""Facts about residues: their codes and letters, and of the 20 amino acids and X the atoms, rigid groups, torsion angles
and symmetries (supplement 1.8.4).

Codes are AlphaFold2's: the 20 amino acids are 0..19 in the order of `RESTYPES`, X (unknown) is 20, the gap of an alignment
21, the mask token of the masked-MSA loss 22. Every array of residues uses these codes; files with another numbering are
translated when they are parsed.

The facts are the tables in `evodsp/geometry/tables`; everything else is derived from them here, once, at import. Only numpy
is imported, so that data-loading workers start fast. Positions are in Å.

Rigid groups of a residue: 0 backbone, 1 omega, 2 phi, 3 psi, 4..7 chi1..chi4. Each is a frame that rotates about a bond. The
atoms of a residue are stored in one of two layouts. atom37 has one slot for every atom name; atom14 has only the slots that
the residue's own atoms need.

The table is AlphaFold2's (`evodsp/geometry/tables/monomer_letters.csv` names its source), because published alignments and
searches were made with it: pyroglutamate (PCA) is E, D-amino acids are their L form, selenocysteine (SEC) is A.
"""

from __future__ import annotations

import csv
from importlib import resources

import numpy as np
from jaxtyping import Float, Float32, Int8, Int32, Int64

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

_EITHER_LETTER = {"B": "D", "Z": "E", "U": "C"}
ALIGNMENT_CODES: dict[str, int] = {
    letter: RESTYPE_ORDER.get(_EITHER_LETTER.get(letter, letter), UNKNOWN) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
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


ATOM_TYPES: tuple[str, ...] = (
    "N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1", "ND2", "OD1", "OD2", "SD",
    "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2", "NH1", "NH2", "OH", "CZ", "CZ2", "CZ3", "NZ", "OXT",
)  # fmt: skip
"""The 37 heavy-atom names of proteins, in atom37 order."""
ATOM_ORDER: dict[str, int] = {name: number for number, name in enumerate(ATOM_TYPES)}
N, CA, C, CB, O = (ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O"))  # noqa: E741
"""atom37 slots of the backbone atoms and CB."""
PSEUDO_BETA_SLOT: Int64[np.ndarray, " 22"] = np.full(LETTERS_WITH_GAP, CB, np.int64)
"""atom37 slot of the atom that stands for each residue type's side chain: CB, CA for glycine (gaps included: CB)."""
PSEUDO_BETA_SLOT[RESTYPE_ORDER["G"]] = CA

_RESTYPE_NUMBER = {residue_name(letter): number for letter, number in RESTYPE_ORDER.items()}
_TYPES, _ATOM14, _ATOM37, _GROUPS, _CHIS = LETTERS_WITH_X, 14, len(ATOM_TYPES), 8, 4


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of a packaged table; lines that begin with # are comments."""
    text = (resources.files("evodsp.geometry") / "tables" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


_ATOMS = read_table("rigid_group_atoms.csv")
_CHI_ANGLES = read_table("chi_angles.csv")
_AMBIGUOUS = read_table("ambiguous_atoms.csv")


def _atom14_names() -> dict[str, tuple[str, ...]]:
    names: dict[str, list[str]] = {residue: [] for residue in _RESTYPE_NUMBER}
    for row in _ATOMS:
        names[row["residue"]].append(row["atom"])
    return {residue: tuple(atoms + [""] * (_ATOM14 - len(atoms))) for residue, atoms in names.items()}


RESTYPE_NAME_TO_ATOM14_NAMES: dict[str, tuple[str, ...]] = _atom14_names()
"""Atom names of each residue (three-letter name, UNK for X) in atom14 order; '' where it has fewer than 14 atoms."""

# One entry for each row of the table of atoms: residue type, atom37 slot, atom14 slot, rigid group, position.
_ATOM_RESTYPE = np.array([_RESTYPE_NUMBER[row["residue"]] for row in _ATOMS])
_SLOT37 = np.array([ATOM_ORDER[row["atom"]] for row in _ATOMS])
_SLOT14 = np.arange(len(_ATOMS)) - np.searchsorted(_ATOM_RESTYPE, _ATOM_RESTYPE)  # residues are listed in order
_GROUP = np.array([int(row["group"]) for row in _ATOMS])
_POSITION = np.array([[float(row[axis]) for axis in "xyz"] for row in _ATOMS])


def _scatter(slot: np.ndarray, width: int, values: np.ndarray | float, dtype: type[np.generic]) -> np.ndarray:
    """[21, width, ...]: the table's `values` at each atom's (residue type, slot), zero elsewhere."""
    table = np.zeros((_TYPES, width, *np.shape(values)[1:]), dtype)
    table[_ATOM_RESTYPE, slot] = values
    return table


RESTYPE_ATOM14_MASK: Float32[np.ndarray, "21 14"] = _scatter(_SLOT14, _ATOM14, 1.0, np.float32)
"""1 where a residue type has an atom in that slot. All zero for X."""
RESTYPE_ATOM37_MASK: Float32[np.ndarray, "21 37"] = _scatter(_SLOT37, _ATOM37, 1.0, np.float32)
RESTYPE_ATOM14_TO_RIGID_GROUP: Int64[np.ndarray, "21 14"] = _scatter(_SLOT14, _ATOM14, _GROUP, np.int64)
"""The rigid group that moves each atom."""
RESTYPE_ATOM14_RIGID_GROUP_POSITIONS: Float32[np.ndarray, "21 14 3"] = _scatter(_SLOT14, _ATOM14, _POSITION, np.float32)
"""Position of each atom in the frame of its rigid group, in Å."""
RESTYPE_ATOM37_RIGID_GROUP_POSITIONS: Float32[np.ndarray, "21 37 3"] = _scatter(_SLOT37, _ATOM37, _POSITION, np.float32)
RESTYPE_ATOM14_TO_ATOM37: Int32[np.ndarray, "21 14"] = _scatter(_SLOT14, _ATOM14, _SLOT37, np.int32)
"""atom37 slot of each atom14 slot; 0 where there is no atom."""
RESTYPE_ATOM37_TO_ATOM14: Int32[np.ndarray, "21 37"] = _scatter(_SLOT37, _ATOM37, _SLOT14, np.int32)
"""atom14 slot of each atom37 slot; 0 where there is no atom."""

_CHI_RESTYPE = np.array([_RESTYPE_NUMBER[row["residue"]] for row in _CHI_ANGLES])
_CHI = np.array([int(row["chi"]) - 1 for row in _CHI_ANGLES])

CHI_ANGLES_MASK: Float32[np.ndarray, "21 4"] = np.zeros((_TYPES, _CHIS), np.float32)
"""1 where a residue type has that side-chain torsion angle."""
CHI_ANGLES_MASK[_CHI_RESTYPE, _CHI] = 1.0
CHI_PI_PERIODIC: Float32[np.ndarray, "21 4"] = np.zeros((_TYPES, _CHIS), np.float32)
"""1 where turning the angle by pi gives the same molecule."""
CHI_PI_PERIODIC[_CHI_RESTYPE, _CHI] = [float(row["symmetric"]) for row in _CHI_ANGLES]
CHI_ANGLES_ATOM_INDICES: Int32[np.ndarray, "21 4 4"] = np.zeros((_TYPES, _CHIS, 4), np.int32)
"""atom37 slots of the four atoms of each angle."""
CHI_ANGLES_ATOM_INDICES[_CHI_RESTYPE, _CHI] = [
    [ATOM_ORDER[row[f"atom{corner}"]] for corner in (1, 2, 3, 4)] for row in _CHI_ANGLES
]


def _renaming_matrices() -> Float32[np.ndarray, "21 14 14"]:
    permutation = np.tile(np.arange(_ATOM14), (_TYPES, 1))
    for row in _AMBIGUOUS:
        number, names = _RESTYPE_NUMBER[row["residue"]], RESTYPE_NAME_TO_ATOM14_NAMES[row["residue"]]
        pair = [names.index(row["atom"]), names.index(row["alternative"])]
        permutation[number, pair] = pair[::-1]
    return np.eye(_ATOM14, dtype=np.float32)[permutation]


RENAMING_MATRICES: Float32[np.ndarray, "21 14 14"] = _renaming_matrices()
"""Permutation of atom14 slots that swaps the names of equivalent atoms (supplement 1.8.5, table 3)."""


def _frame(
    ex: Float[np.ndarray, "n 3"], ey: Float[np.ndarray, "n 3"], origin: Float[np.ndarray, "n 3"]
) -> Float[np.ndarray, "n 4 4"]:
    """Homogeneous matrices of frames with x along `ex` and `ey` in the xy plane."""
    e0 = ex / np.linalg.norm(ex, axis=-1, keepdims=True)
    e1 = ey - e0 * (e0 * ey).sum(-1, keepdims=True)
    e1 /= np.linalg.norm(e1, axis=-1, keepdims=True)
    top = np.stack([e0, e1, np.cross(e0, e1), origin], -1)
    return np.concatenate([top, np.broadcast_to([[[0.0, 0.0, 0.0, 1.0]]], (len(top), 1, 4))], 1)


def _default_frames() -> Float32[np.ndarray, "21 8 4 4"]:
    """Frame of each group at torsion angle zero, in the frame of its parent group (supplement 1.8.4).

    The parent of phi, psi and chi1 is the backbone; the parent of chi2..chi4 is the preceding angle. X and absent angles
    have no frame (zeros).
    """
    frames = np.zeros((_TYPES, _GROUPS, 4, 4))
    known = slice(len(RESTYPES))
    atoms = RESTYPE_ATOM37_RIGID_GROUP_POSITIONS.astype(np.float64)
    n, ca, c = (atoms[known, slot] for slot in (N, CA, C))
    x_axis = np.broadcast_to([1.0, 0.0, 0.0], n.shape)
    frames[known, :2] = np.eye(4)  # the omega group has no heavy atom: it keeps the backbone's frame
    frames[known, 2] = _frame(n - ca, x_axis, n)
    frames[known, 3] = _frame(c - ca, ca - n, c)
    corners = atoms[_CHI_RESTYPE[:, None], CHI_ANGLES_ATOM_INDICES[_CHI_RESTYPE, _CHI]]  # [angle, corner, 3]
    is_first = (_CHI == 0)[:, None]
    start = np.where(is_first, corners[:, 1], 0.0)  # from chi2 on, the bond starts at the parent's origin
    previous = np.where(is_first, corners[:, 0], [-1.0, 0.0, 0.0])  # and the preceding atom lies on its negative x axis
    frames[_CHI_RESTYPE, 4 + _CHI] = _frame(corners[:, 2] - start, previous - start, corners[:, 2])
    return frames.astype(np.float32)


RESTYPE_RIGID_GROUP_DEFAULT_FRAME: Float32[np.ndarray, "21 8 4 4"] = _default_frames()
"""Homogeneous matrix of each group's frame at torsion angle zero, in the parent group's frame. Translations are in Å."""


def _base_atoms() -> Int32[np.ndarray, "21 8 3"]:
    base = np.zeros((_TYPES, _GROUPS, 3), np.int32)
    base[:, 0] = C, CA, N
    base[:, 3] = CA, C, O
    base[:, 4:] = CHI_ANGLES_ATOM_INDICES[..., 1:]
    return base


RESTYPE_RIGID_GROUP_BASE_ATOMS: Int32[np.ndarray, "21 8 3"] = _base_atoms()
"""atom37 slots of the three atoms that define each group's frame: on the negative x axis, at the origin, in the xy plane.

The backbone's x axis is then reversed, to point to C: see `frames.atom37_to_frames`. 0 where no frame is defined.
"""
RESTYPE_RIGID_GROUP_MASK: Float32[np.ndarray, "21 8"] = np.concatenate(
    [np.tile(np.array([1, 0, 0, 1], np.float32), (_TYPES, 1)), CHI_ANGLES_MASK], axis=1
)
"""1 where a residue type's heavy atoms define the group's frame: backbone, psi and its side-chain angles."""
RESTYPE_RIGID_GROUP_IS_AMBIGUOUS: Float32[np.ndarray, "21 8"] = np.pad(CHI_PI_PERIODIC, ((0, 0), (4, 0)))
"""1 where turning the group by pi only swaps the names of equivalent atoms."""

VAN_DER_WAALS_RADIUS: dict[str, float] = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}
"""Radius of each element's atoms, in Å."""
RESTYPE_ATOM14_RADIUS: Float32[np.ndarray, "21 14"] = _scatter(
    _SLOT14, _ATOM14, np.array([VAN_DER_WAALS_RADIUS[row["atom"][0]] for row in _ATOMS]), np.float32
)
"""Van der Waals radius of each atom, in Å; 0 where there is no atom."""
DISTANCE_TOLERANCE = 12.0
"""Allowed deviation of bond lengths and angles from their ideal values, in standard deviations (supplement 1.9.11)."""
CLASH_TOLERANCE = 1.5
"""Allowed overlap of the van der Waals spheres of atoms that are not bonded, in Å (supplement 1.9.11)."""
_NO_UPPER_BOUND = 1e10


def _distance_bounds() -> tuple[Float32[np.ndarray, "21 14 14"], Float32[np.ndarray, "21 14 14"]]:
    """Lower and upper bounds of the distances between the atoms of a residue (supplement 1.9.11).

    Bonded atoms, and the two ends of a bond angle, must keep their ideal distance within the tolerance. All other atoms only
    must not overlap. The distance between the ends of an angle follows from the law of cosines; its standard deviation
    follows from the deviations of the two bonds and the angle by first-order error propagation, taken as independent.
    """
    slots = {
        (r, atom): names.index(atom) for r, names in RESTYPE_NAME_TO_ATOM14_NAMES.items() for atom in names if atom
    }
    bonds = {
        (row["residue"], frozenset((row["atom1"], row["atom2"]))): (float(row["length"]), float(row["deviation"]))
        for row in read_table("bond_lengths.csv")
    }
    angles = read_table("bond_angles.csv")
    first, second = (
        np.array([bonds[row["residue"], frozenset((row["atom2"], row[end]))] for row in angles]).T
        for end in ("atom1", "atom3")
    )
    angle, angle_deviation = np.deg2rad([[float(row["angle"]), float(row["deviation"])] for row in angles]).T
    across = np.sqrt(first[0] ** 2 + second[0] ** 2 - 2 * first[0] * second[0] * np.cos(angle))
    slopes = np.stack([
        first[0] - second[0] * np.cos(angle), second[0] - first[0] * np.cos(angle), first[0] * second[0] * np.sin(angle)
    ]) / across  # fmt: skip
    across_deviation = np.linalg.norm(slopes * [first[1], second[1], angle_deviation], axis=0)

    pairs = [(residue, *sorted(atoms)) for residue, atoms in bonds]
    pairs += [(row["residue"], row["atom1"], row["atom3"]) for row in angles]
    ideal, deviation = np.concatenate([np.array(list(bonds.values())), np.stack([across, across_deviation], -1)]).T
    number = np.array([_RESTYPE_NUMBER[residue] for residue, _, _ in pairs])
    ends = np.array([(slots[residue, one], slots[residue, other]) for residue, one, other in pairs])

    apart = RESTYPE_ATOM14_MASK[:, :, None] * RESTYPE_ATOM14_MASK[:, None] * (1 - np.eye(_ATOM14))
    radius = RESTYPE_ATOM14_RADIUS.astype(np.float64)
    lower = apart * (radius[:, :, None] + radius[:, None] - CLASH_TOLERANCE)
    upper = apart * _NO_UPPER_BOUND
    for one, other in (ends.T, ends.T[::-1]):
        lower[number, one, other] = ideal - DISTANCE_TOLERANCE * deviation
        upper[number, one, other] = ideal + DISTANCE_TOLERANCE * deviation
    return lower.astype(np.float32), upper.astype(np.float32)


ATOM14_DISTS_LOWER_BOUND: Float32[np.ndarray, "21 14 14"]
"""Smallest allowed distance between two atoms of a residue, in Å; 0 for an atom and itself and for absent atoms."""
ATOM14_DISTS_UPPER_BOUND: Float32[np.ndarray, "21 14 14"]
"""Largest allowed distance; 1e10 for atoms without a common bond or bond angle, 0 for an atom and itself and absent atoms."""
ATOM14_DISTS_LOWER_BOUND, ATOM14_DISTS_UPPER_BOUND = _distance_bounds()

MONOMER_LETTERS: dict[str, str] = {
    name: row["letter"] for row in read_table("monomer_letters.csv") for name in row["names"].split()
}
"""Letter of each monomer's name (upper case) that has one."""


def monomer_letter(name: str) -> str:
    """One-letter code of a monomer's name; X for a name that is not in the table."""
    return MONOMER_LETTERS.get(name, "X")
