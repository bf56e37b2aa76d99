"""Structure files without SEQRES: one sequence for each author chain, from its amino acids in the order of the file."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.complexes.merging import merge
from evodsp.data.formats.chains import amino_acid_name, atom_names
from evodsp.data.formats.mmcif import read_chain, read_structure
from evodsp.data.records import Chain
from evodsp.data.sources.msa import QueryMismatch
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.parsed import with_missing_residues
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER, CA, encode
from tests.builders.backbone import Residue, chain, ligand, mmcif_text, pdb_text
from tests.builders.missing_residues import NAMES as PRESENT
from tests.builders.missing_residues import SEEN, WHOLE, write
from tests.builders.mmcif import atom, entry

NAMES = ("GLY", "SER", "MET", "LYS", "TRP", "ALA")
TEXTS = {"pdb": pdb_text, "cif": mmcif_text}
forms = pytest.mark.parametrize("form", TEXTS)


def read(tmp_path: Path, form: str, residues: list[Residue]) -> dict[str, Chain]:
    path = tmp_path / f"1abc.{form}"
    path.write_text(TEXTS[form](residues))
    return read_structure(path).chains


def sequences(chains: dict[str, Chain]) -> dict[str, str]:
    return {name: chain.sequence for name, chain in chains.items()}


def numbered(names: Sequence[str], *numbers: tuple[int, str]) -> list[Residue]:
    """Neighbours with these numbers and insertion codes."""
    return [Residue(name, number, k, code) for k, (name, (number, code)) in enumerate(zip(names, numbers, strict=True))]


SIX = chain(NAMES)
RUNS = [
    replace(one, het=one.name in ("MSE", "SEP", "LYS"), label="ABCDEFG"[k])
    for k, one in enumerate(chain(("GLY", "SER", "MSE", "LYS", "SEP", "ALA", "TRP")))
]
PART = [one for one in SIX if one.number not in (3, 4)]
FREE = [
    ligand("HOH", 1001, atoms=(("O", 0, 0),)),
    ligand("GLY", 1002, row=3),
    ligand("LIG", 1003, row=4),
    ligand("HEM", 1004, row=5, atoms=(("FE", 0, 0), ("CA", 1, 0))),
    ligand("SER", 1005, row=6, atoms=(("N", 0, 0), ("CA", 1.2, 0.8))),
]
BASES = chain(("PSU", "2MG"), chain="R", row=1, atoms=(("P", 0, 0), ("N1", 1, 1), ("C4", 2, 0)))
IMGT = numbered(
    ("CYS", "ALA", "GLY", "SER", "TYR", "ASP", "PHE"),
    *((110, ""), (111, ""), (111, "A"), (112, "B"), (112, "A"), (112, ""), (113, "")),
)
KABAT = numbered(NAMES, (8, ""), (11, ""), (27, ""), (27, "A"), (27, "F"), (28, ""))
MODIFIED = [replace(one, het=one.name in ("MSE", "ZZ9")) for one in chain(("GLY", "SER", "MSE", "ZZ9", "TRP", "ALA"))]
HETS = chain(NAMES, het=True)
TRACE = [replace(one, atoms=(("CA", 0, 0),), het=one.number == 3) for one in SIX]
CODELESS = numbered(NAMES, *((number, "") for number in (1, 2, 2, 2, 3, 4)))
LEFT_OUT = "residues with N, CA and C that no peptide bond joins to chain 'A' are left out: GLY 1002, LIG 1003"
UNLISTED: dict[str, tuple[list[Residue], list[Residue], dict[str, str], list[str]]] = {
    # A chain that ended at its first HETATM (files without TER, or with a label_asym_id for each run of residues).
    "runs": ([*RUNS, FREE[0]], RUNS, {"A": "GSMKSAW"}, []),
    # Copies of a protein that were given the first one's sequence: residues that it lacks were lost.
    "copies": ([*PART, *chain(NAMES, chain="B", row=1)], PART, {"A": "GSWA", "B": "GSMKWA"}, ["gap"]),
    # Waters read as X, files with them refused, and a free glycine or a ligand with N, CA and C in the chain.
    "waters and ligands": ([*SIX, *FREE], SIX, {"A": "GSMKWA"}, [LEFT_OUT]),
    # An RNA chain read as a protein: AlphaFold2's table of letters, of which G and U are some, has bases too.
    "bases": ([*SIX, *BASES], SIX, {"A": "GSMKWA"}, []),
    # Residues sorted by their numbers.
    "IMGT's CDR3": (IMGT, IMGT, {"A": "CAGSYDF"}, []),
    # A jump of numbers, as from Kabat's 27 to 28 by 27A to 27F, or from 8 to 11, taken for a break.
    "Kabat": (KABAT, KABAT, {"A": "GSMKWA"}, []),
    # A bonded HETATM lost, or put at the chain's end, where a program lists all HETATM behind the others.
    "HETATM last": (
        [*MODIFIED[:2], *MODIFIED[4:], FREE[1], *MODIFIED[2:4]],
        *(MODIFIED, {"A": "GSMXWA"}, ["left out: GLY 1002", "no known name and are X: ZZ9 4"]),
    ),
    # A chain refused whose program calls every residue HETATM.
    "all HETATM": ([*HETS, FREE[1]], HETS, {"A": "GSMKWA"}, ["left out: GLY 1002"]),
    # Residues lost that have no N and C.
    "trace of CA": (TRACE, TRACE, {"A": "GSMKWA"}, []),
    # Neighbours of one number, whose insertion codes a program dropped, taken for two monomers at one place.
    "dropped codes": (CODELESS, CODELESS, {"A": "GSMKWA"}, []),
}


@forms
@pytest.mark.parametrize("case", UNLISTED)
def test_residues_of_an_unlisted_chain(tmp_path: Path, form: str, case: str) -> None:
    """Catches what is said of each case, atoms on other residues, and residues left out without a note."""
    file, members, letters, notes = UNLISTED[case]
    chains = read(tmp_path, form, file)
    found = chains["A"]
    assert sequences(chains) == letters
    assert list(zip(found.residue_number.tolist(), found.insertion_code, strict=True)) == [
        (one.number, one.code) for one in members
    ]
    assert not found.is_missing.any()
    assert found.mask.sum() == sum(len(one.atoms) for one in members)
    places = [3.8 * one.at + {name: x for name, x, _ in one.atoms}["CA"] for one in members]
    np.testing.assert_allclose(found.positions[:, CA, 0], places, atol=2e-3)
    assert [part in note for part, note in zip(notes, found.notes, strict=True)] == [True] * len(notes)


@forms
@pytest.mark.parametrize(("distance", "breaks"), [(1.9, False), (2.1, True)])
def test_a_break_is_a_long_bond(tmp_path: Path, form: str, distance: float, breaks: bool) -> None:
    """Catches breaks that nobody is told of, and breaks taken from numbers: the residues here are 1 to 6."""
    residues = [replace(r, at=r.at + (distance - 1.3) / 3.8 * (r.number > 3)) for r in chain(NAMES)]
    (found,) = read(tmp_path, form, residues).values()
    assert found.sequence == "GSMKWA"
    said = "chain 'A' has no listed sequence and a gap behind MET 3; the residues that are missing"
    assert [note.startswith(said) for note in found.notes] == [True] * breaks


def test_blank_chain_name(tmp_path: Path) -> None:
    """Catches a PDB file without chain names that is refused."""
    chains = read(tmp_path, "pdb", chain(NAMES, chain=" "))
    assert sequences(chains) == {"": "GSMKWA"}
    assert read_chain(tmp_path / "1abc.pdb", "").sequence == "GSMKWA"
    with pytest.raises(UserError, match=r"no protein chain 'A'.*Chains: ''; give"):
        read_chain(tmp_path / "1abc.pdb", "A")


def test_without_ter_but_with_seqres(tmp_path: Path) -> None:
    """Catches residues behind the first HETATM that are marked as missing, because the file has no TER."""
    residues = [replace(r, het=r.number in (3, 4)) for r in chain(NAMES)]
    header = f"SEQRES   1 A    8  ASP {' '.join(NAMES)} ASP\n"
    (tmp_path / "a.pdb").write_text(pdb_text([*residues, ligand("GLY", 99)], header))
    found = read_chain(tmp_path / "a.pdb", "A")
    assert found.sequence == "DGSMKWAD"
    assert found.is_missing.tolist() == [True, *[False] * 6, True]


def test_behind_ter(tmp_path: Path) -> None:
    """Catches the rest of a chain lost for a TER at a break, and a free amino acid behind TER that is no part of it."""
    residues = chain(NAMES)
    behind = [replace(r, at=r.at + 5) for r in residues[3:]]
    free = ligand("GLY", 99, het=False)
    files: list[list[Residue | str]] = [
        [*residues[:3], "TER", *behind],
        [*residues[:3], "TER", *behind, "TER"],
        [*residues, "TER", free],
    ]
    for lines in files:
        (tmp_path / "a.pdb").write_text(pdb_text(lines))
        assert read_chain(tmp_path / "a.pdb", "A").sequence == "GSMKWA"


SEEN_TWICE = [
    *chain(("GLY",)),
    Residue("SER", 2, 1, altloc="A", occupancy=0.4, atoms=(("N", 0, 0), ("CA", 1.2, 0.8), ("C", 2.5, 0), ("OG", 1, 2))),
    Residue(
        "PRO", 2, 1.01, altloc="B", occupancy=0.6, atoms=(("N", 0, 0), ("CA", 1.2, 0.8), ("C", 2.5, 0), ("CG", 1, 2))
    ),
    Residue("ALA", 3, 2),
]


@forms
def test_two_monomers_at_one_place(tmp_path: Path, form: str) -> None:
    """Catches both monomers in the sequence, and atoms of both in one residue."""
    (found,) = read(tmp_path, form, SEEN_TWICE).values()
    assert (found.sequence, found.alternatives) == ("GPA", ((1, "SP"),))
    assert [bool(found.mask[1, ATOM_ORDER[name]]) for name in ("OG", "CG")] == [False, True]
    assert found.positions[1, ATOM_ORDER["CA"], 0] == pytest.approx(3.8 * 1.01 + 1.2, abs=1e-3)


@pytest.mark.parametrize(("listed", "atoms"), [("PRO", [False, True]), ("SER", [True, False]), ("TYR", [False, True])])
def test_two_monomers_where_seqres_lists_one(tmp_path: Path, listed: str, atoms: list[bool]) -> None:
    """Catches atoms of two monomers in one residue of a PDB file, and a letter that is not that of the residue's atoms."""
    (tmp_path / "a.pdb").write_text(pdb_text([*SEEN_TWICE, "TER"], f"SEQRES   1 A    3  GLY {listed} ALA\n"))
    found = read_chain(tmp_path / "a.pdb", "A")
    assert found.sequence == {"PRO": "GPA", "SER": "GSA", "TYR": "GPA"}[listed]
    assert [bool(found.mask[1, ATOM_ORDER[name]]) for name in ("OG", "CG")] == atoms


def test_of_two_polymers_under_one_author_id_the_longer(tmp_path: Path) -> None:
    """Catches the first, or the last, of two polymers of one author chain id taken, and the other lost in silence."""
    second = {"label_asym_id": "B", "auth_asym_id": "A"}
    atoms = [atom("CA", "GLY", 1, 1), atom("CA", "TRP", 1, 2, **second), atom("CA", "LYS", 3, 3, **second)]
    for names in ({"A": "1:GLY 2:SER", "B": "1:TRP 2:SER 3:LYS"}, {"B": "1:TRP 2:SER 3:LYS", "A": "1:GLY 2:SER"}):
        (tmp_path / "a.cif").write_text(entry(names, atoms))
        assert sequences(read_structure(tmp_path / "a.cif").chains) == {"A": "WSK"}
    longer_first = [atom("CA", "TRP", 1, 2), atom("CA", "LYS", 3, 3), atom("CA", "GLY", 1, 1, **second)]
    (tmp_path / "a.cif").write_text(entry({"A": "1:TRP 2:SER 3:LYS", "B": "1:GLY 2:SER"}, longer_first))
    found = read_structure(tmp_path / "a.cif").chains
    assert sequences(found) == {"A": "WSK"}
    assert found["A"].notes == ("two polymers are chain 'A', and the longer one is read: label_asym_id A, not B",)


def test_missing_occupancy_is_one(tmp_path: Path) -> None:
    """Catches a missing occupancy taken for 0, or the first location taken whatever the occupancies are."""
    atoms = [
        atom("CA", "SER", 1, 1, label_alt_id="A", occupancy=0.4),
        atom("CA", "SER", 1, 2, label_alt_id="B", occupancy="?"),
    ]
    (tmp_path / "a.cif").write_text(entry({"A": "1:SER"}, atoms))
    assert read_chain(tmp_path / "a.cif", "A").positions[0, ATOM_ORDER["CA"], 0] == 2


def test_a_note_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches residues left out that nobody is told of, and the same line for each read of a file."""
    path = tmp_path / "1abc.pdb"
    path.write_text(pdb_text([*chain(NAMES), ligand("GLY", 99)]))
    note = "residues with N, CA and C that no peptide bond joins to chain 'A' are left out: GLY 99"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read_chain(path, "A")
    assert caplog.messages == [f"{path}: {note}"]


# Structure files that went through simulation and modelling programs: no residue or atom vanishes or moves without a line.


TWELVE = ("GLY", "SER", "HIS", "CYS", "ASP", "GLU", "TRP", "ALA", "LYS", "PHE", "VAL", "ALA")
LETTERS = "GSHCDEWAKFVA"
SEQRES = f"SEQRES   1 A   12  {' '.join(TWELVE)}\n"
BACKBONE = (("N", 0.0, 0.0), ("CA", 1.2, 0.8), ("C", 2.5, 0.0))


def read_text(tmp_path: Path, text: str, form: str = "pdb") -> dict[str, Chain]:
    path = tmp_path / f"1abc.{form}"
    path.write_text(text)
    return read_structure(path).chains


def renamed(names: dict[int, str]) -> list[Residue]:
    return [replace(one, name=names.get(one.number, one.name)) for one in chain(TWELVE)]


def assert_in_place(one: Chain, row: float = 0.0) -> None:
    """Every residue has its three atoms, each of its own place."""
    assert one.mask.sum() == 3 * len(one)
    np.testing.assert_allclose(one.positions[:, ATOM_ORDER["N"], 0], 3.8 * np.arange(len(one)), atol=2e-3)
    np.testing.assert_allclose(one.positions[:, ATOM_ORDER["CA"], 2], row, atol=2e-3)


RENAMED = {
    "Amber": ({3: "HIE", 4: "CYX", 5: "ASH", 6: "GLH", 9: "LYN"}, LETTERS, ""),
    "CHARMM": ({3: "HSD"}, LETTERS, ""),
    "unknown": (
        {3: "UNK", 7: "UNK"},
        LETTERS,
        "names residues that are unknown in its atoms, and is taken: UNK 3 for HIS",
    ),
    "mutated": (
        {9: "ARG"},
        LETTERS.replace("K", "R"),
        "has other residues than its atoms, whose names are taken: ARG 9 for LYS",
    ),
}


@pytest.mark.parametrize("case", RENAMED)
def test_seqres_beside_other_names(tmp_path: Path, case: str) -> None:
    """Catches residues whose coordinates are lost because SEQRES names them otherwise, and a mutation in silence."""
    names, letters, said = RENAMED[case]
    found = read_text(tmp_path, pdb_text([*renamed(names), "TER"], SEQRES))["A"]
    assert found.sequence == letters
    assert_in_place(found)
    assert [said in note for note in found.notes] == [True] * bool(said)


def test_seqres_lacks_residues(tmp_path: Path) -> None:
    """Catches a residue with atoms that is lost because SEQRES lacks it, and a missing one put in its place."""
    listed = " ".join(("MET", *TWELVE[:6], *TWELVE[7:]))
    text = pdb_text([one for one in chain(TWELVE) if one.number != 10], f"SEQRES   1 A   12  {listed}\n")
    found = read_text(tmp_path, text)["A"]
    assert (found.sequence, found.is_missing.nonzero()[0].tolist()) == ("M" + LETTERS, [0, 10])
    assert "lacks residues that have atoms, which are put into it: TRP 7" in found.notes[0]


def test_seqres_of_another_protein(tmp_path: Path) -> None:
    """Catches a chain read with the sequence of another one: most of its atoms would count as those of other amino acids."""
    with pytest.raises(UserError, match=r"listed of chain 'A' is not that of its atoms: 2 of its 12 residues differ"):
        read_text(tmp_path, pdb_text(renamed({3: "TRP", 9: "ARG"}), SEQRES))


@forms
def test_a_chain_in_two_runs(tmp_path: Path, form: str) -> None:
    """Catches the shorter of two runs of a chain's records lost, and side chains that are listed behind another chain."""
    first, second = chain(TWELVE), chain(TWELVE, chain="B", row=1)
    side = replace(first[1], atoms=(("OG", 1.0, 2.0),))
    found = read_text(tmp_path, TEXTS[form]([*first[:7], *second, *first[7:], side]), form)
    assert sequences(found) == {"A": LETTERS, "B": LETTERS}
    assert found["A"].mask[1, ATOM_ORDER["OG"]] == 1
    assert found["A"].mask.sum() == 37


@forms
@pytest.mark.parametrize("second", [TWELVE, TWELVE[5:] + TWELVE[:5]])
def test_two_chains_of_one_name(tmp_path: Path, form: str, second: tuple[str, ...]) -> None:
    """Catches residues made of atoms of two copies, and a copy lost, where a chain's numbers begin again."""
    found = read_text(tmp_path, TEXTS[form]([*chain(TWELVE), *chain(second, row=1)]), form)
    assert list(found) == ["A", "A-2"]
    for row, one in enumerate(found.values()):
        assert_in_place(one, 20.0 * row)
        assert one.notes == ("chain 'A' holds residues of the same numbers again, and is read as the chains A, A-2",)


def test_listed_copies_under_one_label(tmp_path: Path) -> None:
    """Catches atoms of two copies mixed in a listed mmCIF file, where each atom occurs twice."""
    atoms = [atom(name, "GLY", 1, x + at) for x in (0, 14) for at, name in enumerate(("N", "CA"))]
    with pytest.raises(UserError, match=r"of GLY 1 occurs twice, 14\.0 Å apart, in one chain \(2 such atoms\)"):
        read_text(tmp_path, entry({"A": "1:GLY"}, atoms), "cif")


def test_an_atom_twice_at_one_place(tmp_path: Path) -> None:
    """Catches locations without letters of which one is taken in silence."""
    twice = replace(chain(TWELVE)[1], atoms=(*BACKBONE, ("OG", 1, 2), ("OG", 1, 3)))
    found = read_text(tmp_path, pdb_text([chain(TWELVE)[0], twice, *chain(TWELVE)[2:]]))["A"]
    assert found.sequence == LETTERS
    assert [note.endswith("is taken: OG of SER 2") for note in found.notes] == [True]


UNNAMED = {
    "numbers": [*chain(TWELVE, chain=" "), *chain(TWELVE[3:], chain=" ", row=1)],
    "TER": [*chain(TWELVE, chain=" "), "TER", *chain(TWELVE[3:], first=13, chain=" ", row=1)],
}


@pytest.mark.parametrize("case", UNNAMED)
def test_chains_without_names(tmp_path: Path, case: str) -> None:
    """Catches chains of files without chain names (GROMACS, Amber) that become one chain, or one of them lost."""
    found = read_text(tmp_path, pdb_text(UNNAMED[case]))
    assert sequences(found) == {"A": LETTERS, "B": LETTERS[3:]}
    assert "the file names no chains" in found["B"].notes[0]


def test_segments_name_chains(tmp_path: Path) -> None:
    """Catches segments of CHARMM that are not told apart where numbers go on."""
    lines = pdb_text([*chain(TWELVE, chain=" "), *chain(TWELVE, first=13, chain=" ", row=1)]).split("\n")
    text = "\n".join(f"{line[:72]}{'PROA' if k < 36 else 'PROB'}{line[76:]}" if line[:4] == "ATOM" else line
                     for k, line in enumerate(lines))  # fmt: skip
    assert sequences(read_text(tmp_path, text)) == {"PROA": LETTERS, "PROB": LETTERS}


def test_numbers_that_begin_again_inside_a_chain(tmp_path: Path) -> None:
    """Catches a chain cut in two where four digits do not hold its numbers, though a peptide bond goes on."""
    residues = [replace(one, number=one.number % 7, chain=" ") for one in chain(TWELVE)]
    found = read_text(tmp_path, pdb_text(residues))
    assert sequences(found) == {"": LETTERS}
    assert_in_place(found[""])


@pytest.mark.parametrize("name", [" ", "A"])
def test_names_of_four_letters(tmp_path: Path, name: str) -> None:
    """Catches the fourth letter of ASPP read as the first one of a chain's name."""
    lines = pdb_text(chain(TWELVE, chain=name)).replace("ASP ", "ASPP").replace("GLU ", "GLUP")
    assert sequences(read_text(tmp_path, lines)) == {name.strip(): LETTERS}


def test_chain_names_of_two_letters(tmp_path: Path) -> None:
    """Catches chain PA of a file with long chain names whose ASP is read as ASPP of chain A."""
    lines = pdb_text(chain(TWELVE)).split("\n")
    assert sequences(read_text(tmp_path, "\n".join(f"{line[:20]}P{line[21:]}" for line in lines))) == {"PA": LETTERS}


@pytest.mark.parametrize(
    ("name", "side", "letter"),
    [
        ("HSE", ("CB", "CG", "ND1", "CD2", "CE1", "NE2"), "H"),
        ("HSE", ("CB", "CG", "OD"), "S"),
        ("GLH", ("CB", "CG", "CD", "OE1", "OE2"), "E"),
        ("HIP", ("CB", "CG", "ND1", "CD2", "CE1", "NE2"), "H"),
        ("CYX", ("CB", "SG"), "C"),
        ("ZZ9", ("CB",), "X"),
    ],
)
@forms
def test_names_of_force_fields(tmp_path: Path, form: str, name: str, side: tuple[str, ...], letter: str) -> None:
    """Catches names of force fields read as X or as another monomer of the PDB, and homoserine read as histidine."""
    residues = chain(TWELVE)
    residues[2] = replace(
        residues[2], name=name, atoms=(*BACKBONE, *((one, 1, 1 + k) for k, one in enumerate(side, 1)))
    )
    found = read_text(tmp_path, TEXTS[form](residues), form)["A"]
    assert found.sequence == LETTERS[:2] + letter + LETTERS[3:]
    assert found.notes == (("residues of chain 'A' have no known name and are X: ZZ9 3",) if letter == "X" else ())


def test_atoms_of_force_fields() -> None:
    """Catches CD of isoleucine and the ends of chains lost, and a ligand called like a force field's residue renamed."""
    assert atom_names("ILE", ["N", "CA", "CD", "OT1", "OT2"]) == {"CD": "CD1", "OT1": "O", "OT2": "OXT"}
    assert atom_names("LYS", ["N", "CD", "O", "OC1", "OC2"]) == {"OC2": "OXT"}
    assert amino_acid_name("HID", ["C1", "C2", "N7"]) == "HID"
    assert amino_acid_name("NILE", ["N", "H1", "CA", "CD", "HB"]) == "ILE"


def test_an_atom_without_a_slot_is_named(tmp_path: Path) -> None:
    """Catches heavy atoms with unknown names lost in silence."""
    residues = chain(TWELVE)
    residues[1] = replace(residues[1], atoms=(*BACKBONE, ("OQ9", 1, 2), ("HB1", 1, 3)))
    (note,) = read_text(tmp_path, pdb_text(residues))["A"].notes
    assert note == "atoms that no amino acid has under their names are left out: OQ9 of SER 2"


def models(*parts: list[Residue]) -> str:
    return "".join(f"MODEL {k:8}\n{pdb_text(part)[:-4]}ENDMDL\n" for k, part in enumerate(parts, 1)) + "END\n"


def test_models_with_other_chains(tmp_path: Path) -> None:
    """Catches all chains but the first model's lost where MODEL records hold an assembly; an NMR ensemble stays one chain."""
    other = chain(TWELVE[3:], chain="B", row=1)
    found = read_text(tmp_path, models(chain(TWELVE), other))
    assert sequences(found) == {"A": LETTERS, "B": LETTERS[3:]}
    assert found["A"].notes == ("the models of the file are parts of one assembly, and are read as its chains: A, B",)
    moved = [replace(one, row=1) for one in chain(TWELVE)]
    assert list(read_text(tmp_path, models(chain(TWELVE), moved))) == ["A", "A-2"]
    rows = [line for line in mmcif_text(moved).split("\n") if line.startswith("ATOM")]
    both = mmcif_text(chain(TWELVE)) + "\n".join(row.removesuffix("1") + "2" for row in rows) + "\n"
    assert sequences(read_text(tmp_path, both, "cif")) == {"A": LETTERS, "A-2": LETTERS}
    bent = [replace(one, at=one.at + 0.01 * one.number**2, row=1) for one in chain(TWELVE)]
    assert sequences(read_text(tmp_path, models(chain(TWELVE), bent))) == {"A": LETTERS}
    ended = pdb_text(chain(TWELVE)) + pdb_text(other)  # the first END is no end
    assert sequences(read_text(tmp_path, ended)) == {"A": LETTERS, "B": LETTERS[3:]}


LISTED = {"A": " ".join(f"{k}:{name}" for k, name in enumerate(TWELVE, 1))}


def listed_atoms(number: int = 0, **changes: object) -> list[str]:
    """Atoms of a listed chain; `changes` are those of the residue of this number."""
    return [
        atom(
            name,
            one.name,
            one.number,
            round(3.8 * one.at + x, 3),
            Cartn_y=y,
            **(changes if one.number == number else {}),
        )
        for one in chain(TWELVE)
        for name, x, y in one.atoms
    ]


def test_listed_residue_without_its_number(tmp_path: Path) -> None:
    """Catches a listed residue masked because its atoms have no label_seq_id; a free ligand of that name stays one."""
    het = {"label_seq_id": ".", "group_PDB": "HETATM"}
    for changes in (het, {**het, "label_asym_id": "C"}):
        found = read_text(tmp_path, entry(LISTED, listed_atoms(8, **changes)), "cif")["A"]
        assert found.sequence == LETTERS
        assert_in_place(found)
    free = [atom("CA", "ALA", 301, 90, label_asym_id="C", **het)]
    assert read_text(tmp_path, entry(LISTED, [*listed_atoms(), *free]), "cif")["A"].sequence == LETTERS


def test_listed_chain_with_names_of_a_force_field(tmp_path: Path) -> None:
    """Catches HSD of a listed mmCIF file read as X."""
    listed = {"A": LISTED["A"].replace("HIS", "HSD")}
    found = read_text(tmp_path, entry(listed, listed_atoms(3, label_comp_id="HSD")), "cif")["A"]
    assert (found.sequence, found.mask.sum()) == (LETTERS, 36)


def without(text: str, *columns: str) -> str:
    """mmCIF text without these columns of its atoms."""
    head, *rows = text.split("\nATOM ")
    titles = [line for line in head.split("\n") if line.startswith("_atom_site.")]
    gone = [titles.index(f"_atom_site.{column}") for column in columns]
    kept = "\n".join(line for line in head.split("\n") if line not in {titles[k] for k in gone})
    return (
        kept
        + "".join("\n" + " ".join(v for k, v in enumerate(f"ATOM {row}".split()) if k not in gone) for row in rows)
        + "\n"
    )


@pytest.mark.parametrize(
    "columns",
    ["id", "type_symbol", "label_alt_id", "label_asym_id", "label_seq_id", "auth_asym_id", "auth_seq_id", "group_PDB",
     "id type_symbol label_alt_id label_asym_id label_seq_id occupancy pdbx_PDB_model_num pdbx_PDB_ins_code"],
)  # fmt: skip
def test_lean_mmcif(tmp_path: Path, columns: str) -> None:
    """Catches predictors' mmCIF files refused, without a reason, for a column that says nothing new."""
    found = read_text(
        tmp_path, without(mmcif_text([*chain(TWELVE), *chain(TWELVE, chain="B", row=1)]), *columns.split()), "cif"
    )
    assert sequences(found) == {"A": LETTERS, "B": LETTERS}
    assert_in_place(found["B"], 20.0)


@pytest.mark.parametrize("column", ["label_atom_id", "label_comp_id", "Cartn_z"])
def test_a_needed_column_is_named(tmp_path: Path, column: str) -> None:
    """Catches a message without a reason, and z read as 0."""
    with pytest.raises(UserError, match=rf"no column _atom_site\.{column}; add it"):
        read_text(tmp_path, without(mmcif_text(chain(TWELVE)), column), "cif")


def test_polymer_of_nucleotides_with_a_ligand(tmp_path: Path) -> None:
    """Catches listed RNA read as a chain of X because an amino acid lies beside it."""
    bases = [replace(one, atoms=(("P", 0, 0), ("N1", 1, 1))) for one in chain(("A", "G", "C"), chain="R", row=1)]
    free = [Residue("GLY", 99, 40, chain="R", het=True, row=9)]
    text = pdb_text([*chain(TWELVE), "TER", *bases, "TER", *free], SEQRES + "SEQRES   1 R    3    A   G   C\n")
    assert sequences(read_text(tmp_path, text)) == {"A": LETTERS}
    assert read_chain(tmp_path / "1abc.pdb", "A").mask.sum() == 36


# Residues that a structure file without SEQRES does not have: `data/sources/parsed.py`.


def test_missing_residues_are_those_of_the_alignment(tmp_path: Path) -> None:
    """Catches a chain of the lab's refinement that is refused, and atoms that are put on the wrong residues."""
    parsed = write(tmp_path).parsed("x", with_hits=False)
    assert parsed.assembly.chains[0].sequence == WHOLE
    assert np.flatnonzero(~parsed.assembly.chains[0].is_missing).tolist() == list(SEEN)
    assert (
        parsed.assembly.chains[0].mask[:, CA].astype(bool).tolist() == (~parsed.assembly.chains[0].is_missing).tolist()
    )
    alone = read_chain(tmp_path / "x.pdb", "A")
    assert alone.breaks == (3,)
    np.testing.assert_array_equal(parsed.assembly.chains[0].positions[list(SEEN)], alone.positions)
    assert parsed.assembly.chains[0].residue_number[list(SEEN)].tolist() == alone.residue_number.tolist()
    assert parsed.chains[0].msa.msa.shape[1] == len(WHOLE)


def test_missing_residues_of_a_complex(tmp_path: Path) -> None:
    """Catches a complex of the lab's refinement whose chains lack the residues that their alignments have, and copies of
    a chain that lack different ones."""
    copies = {"A": SEEN, "B": (1, 2, 3, 4, 7, 8)}
    residues = [
        chain(PRESENT, chain=name, row=row)[place] for row, (name, seen) in enumerate(copies.items()) for place in seen
    ]
    (tmp_path / "y.pdb").write_text(pdb_text(residues))
    for name in copies:
        (own := tmp_path / "a" / f"y_{name}").mkdir(parents=True)
        (own / "hits.a3m").write_text(f">101\n{WHOLE}\n>hit\n{WHOLE[:-1]}-\n")
    parsed = ComplexFiles(tmp_path / "a", tmp_path).parsed("y")
    assert [chain.sequence for chain in parsed.assembly.chains] == [WHOLE, WHOLE]
    for own, seen in zip(parsed.assembly.chains, copies.values(), strict=True):
        assert np.flatnonzero(~own.is_missing).tolist() == list(seen)
    assert merge(parsed.chains).msa.shape == (2, 2 * len(WHOLE))


def test_a_listed_sequence_stays(tmp_path: Path) -> None:
    """Catches residues that are added to a chain whose file lists its sequence."""
    piece = (1, 2, 3, 4)
    store = write(tmp_path, piece, header=f"SEQRES   1 A    4  {' '.join(PRESENT[place] for place in piece)}\n")
    with pytest.raises(
        QueryMismatch, match=r"has 12 residues, the query 'x' has 4; search again with this query, or rem"
    ):
        store.parsed("x", with_hits=False)


@pytest.mark.parametrize(
    ("seen", "row"),
    [
        (SEEN, "GSMKWADEFHIR"[::-1]),
        (SEEN, WHOLE.replace("M", "A")),
        ((0, 1, 5), "GSGSA"),
        ((0, 1), "GSGS"),
        ((7, 8, 9, 1, 2, 3), WHOLE),
    ],
    ids=["other", "mutated", "two_places", "two_places_of_one_piece", "other_order"],
)
def test_pieces_that_do_not_fit_in_one_way(tmp_path: Path, seen: tuple[int, ...], row: str) -> None:
    """Catches pieces that are put where they do not belong, and the first of two places taken for the only one."""
    with pytest.raises(
        QueryMismatch, match=r"x\.a3m: the first row '101'.*its chain is not this row with some residues"
    ):
        write(tmp_path, seen, row).parsed("x", with_hits=False)


def test_unknown_residues_and_gaps(tmp_path: Path) -> None:
    """Catches X that matches nothing, and a gap that is taken for a residue."""
    write(tmp_path)
    one = read_chain(tmp_path / "x.pdb", "A")
    unknown = with_missing_residues(replace(one, sequence="X" + one.sequence[1:]), encode(WHOLE.replace("F", "X")))
    assert unknown is not None
    assert unknown.sequence == "GXMKWADEFHIK"
    assert with_missing_residues(one, encode("-" + WHOLE)) is None


def test_the_mismatch_of_a_worker_arrives() -> None:
    """Catches an error with an argument of its own, which a process that makes samples cannot send."""
    sent = pickle.loads(pickle.dumps(QueryMismatch("x", encode("AC"))))
    assert isinstance(sent, UserError)
    assert str(sent) == "x"
    assert sent.found.tolist() == encode("AC").tolist()
