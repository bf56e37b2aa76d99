"""Structure files that went through simulation and modelling programs: no residue or atom vanishes or moves without a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats.chains import amino_acid_name, atom_names
from evodsp.data.formats.mmcif import read_chain, read_structure
from evodsp.data.records import Chain
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER
from tests.builders.backbone import Residue, chain, mmcif_text, pdb_text
from tests.builders.mmcif import atom, entry

NAMES = ("GLY", "SER", "HIS", "CYS", "ASP", "GLU", "TRP", "ALA", "LYS", "PHE", "VAL", "ALA")
LETTERS = "GSHCDEWAKFVA"
SEQRES = f"SEQRES   1 A   12  {' '.join(NAMES)}\n"
TEXTS = {"pdb": pdb_text, "cif": mmcif_text}
forms = pytest.mark.parametrize("form", TEXTS)
BACKBONE = (("N", 0.0, 0.0), ("CA", 1.2, 0.8), ("C", 2.5, 0.0))


def read(tmp_path: Path, text: str, form: str = "pdb") -> dict[str, Chain]:
    path = tmp_path / f"1abc.{form}"
    path.write_text(text)
    return read_structure(path).chains


def renamed(names: dict[int, str]) -> list[Residue]:
    return [replace(one, name=names.get(one.number, one.name)) for one in chain(NAMES)]


def sequences(chains: dict[str, Chain]) -> dict[str, str]:
    return {name: one.sequence for name, one in chains.items()}


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
    found = read(tmp_path, pdb_text([*renamed(names), "TER"], SEQRES))["A"]
    assert found.sequence == letters
    assert_in_place(found)
    assert [said in note for note in found.notes] == [True] * bool(said)


def test_seqres_lacks_residues(tmp_path: Path) -> None:
    """Catches a residue with atoms that is lost because SEQRES lacks it, and a missing one put in its place."""
    listed = " ".join(("MET", *NAMES[:6], *NAMES[7:]))
    text = pdb_text([one for one in chain(NAMES) if one.number != 10], f"SEQRES   1 A   12  {listed}\n")
    found = read(tmp_path, text)["A"]
    assert (found.sequence, found.is_missing.nonzero()[0].tolist()) == ("M" + LETTERS, [0, 10])
    assert "lacks residues that have atoms, which are put into it: TRP 7" in found.notes[0]


def test_seqres_of_another_protein(tmp_path: Path) -> None:
    """Catches a chain read with the sequence of another one: most of its atoms would count as those of other amino acids."""
    with pytest.raises(UserError, match=r"listed of chain 'A' is not that of its atoms: 2 of its 12 residues differ"):
        read(tmp_path, pdb_text(renamed({3: "TRP", 9: "ARG"}), SEQRES))


@forms
def test_a_chain_in_two_runs(tmp_path: Path, form: str) -> None:
    """Catches the shorter of two runs of a chain's records lost, and side chains that are listed behind another chain."""
    first, second = chain(NAMES), chain(NAMES, chain="B", row=1)
    side = replace(first[1], atoms=(("OG", 1.0, 2.0),))
    found = read(tmp_path, TEXTS[form]([*first[:7], *second, *first[7:], side]), form)
    assert sequences(found) == {"A": LETTERS, "B": LETTERS}
    assert found["A"].mask[1, ATOM_ORDER["OG"]] == 1
    assert found["A"].mask.sum() == 37


@forms
@pytest.mark.parametrize("second", [NAMES, NAMES[5:] + NAMES[:5]])
def test_two_chains_of_one_name(tmp_path: Path, form: str, second: tuple[str, ...]) -> None:
    """Catches residues made of atoms of two copies, and a copy lost, where a chain's numbers begin again."""
    found = read(tmp_path, TEXTS[form]([*chain(NAMES), *chain(second, row=1)]), form)
    assert list(found) == ["A", "A-2"]
    for row, one in enumerate(found.values()):
        assert_in_place(one, 20.0 * row)
        assert one.notes == ("chain 'A' holds residues of the same numbers again, and is read as the chains A, A-2",)


def test_listed_copies_under_one_label(tmp_path: Path) -> None:
    """Catches atoms of two copies mixed in a listed mmCIF file, where each atom occurs twice."""
    atoms = [atom(name, "GLY", 1, x + at) for x in (0, 14) for at, name in enumerate(("N", "CA"))]
    with pytest.raises(UserError, match=r"of GLY 1 occurs twice, 14\.0 Å apart, in one chain \(2 such atoms\)"):
        read(tmp_path, entry({"A": "1:GLY"}, atoms), "cif")


def test_an_atom_twice_at_one_place(tmp_path: Path) -> None:
    """Catches locations without letters of which one is taken in silence."""
    twice = replace(chain(NAMES)[1], atoms=(*BACKBONE, ("OG", 1, 2), ("OG", 1, 3)))
    found = read(tmp_path, pdb_text([chain(NAMES)[0], twice, *chain(NAMES)[2:]]))["A"]
    assert found.sequence == LETTERS
    assert [note.endswith("is taken: OG of SER 2") for note in found.notes] == [True]


UNNAMED = {
    "numbers": [*chain(NAMES, chain=" "), *chain(NAMES[3:], chain=" ", row=1)],
    "TER": [*chain(NAMES, chain=" "), "TER", *chain(NAMES[3:], first=13, chain=" ", row=1)],
}


@pytest.mark.parametrize("case", UNNAMED)
def test_chains_without_names(tmp_path: Path, case: str) -> None:
    """Catches chains of files without chain names (GROMACS, Amber) that become one chain, or one of them lost."""
    found = read(tmp_path, pdb_text(UNNAMED[case]))
    assert sequences(found) == {"A": LETTERS, "B": LETTERS[3:]}
    assert "the file names no chains" in found["B"].notes[0]


def test_segments_name_chains(tmp_path: Path) -> None:
    """Catches segments of CHARMM that are not told apart where numbers go on."""
    lines = pdb_text([*chain(NAMES, chain=" "), *chain(NAMES, first=13, chain=" ", row=1)]).split("\n")
    text = "\n".join(f"{line[:72]}{'PROA' if k < 36 else 'PROB'}{line[76:]}" if line[:4] == "ATOM" else line
                     for k, line in enumerate(lines))  # fmt: skip
    assert sequences(read(tmp_path, text)) == {"PROA": LETTERS, "PROB": LETTERS}


def test_numbers_that_begin_again_inside_a_chain(tmp_path: Path) -> None:
    """Catches a chain cut in two where four digits do not hold its numbers, though a peptide bond goes on."""
    residues = [replace(one, number=one.number % 7, chain=" ") for one in chain(NAMES)]
    found = read(tmp_path, pdb_text(residues))
    assert sequences(found) == {"": LETTERS}
    assert_in_place(found[""])


@pytest.mark.parametrize("name", [" ", "A"])
def test_names_of_four_letters(tmp_path: Path, name: str) -> None:
    """Catches the fourth letter of ASPP read as the first one of a chain's name."""
    lines = pdb_text(chain(NAMES, chain=name)).replace("ASP ", "ASPP").replace("GLU ", "GLUP")
    assert sequences(read(tmp_path, lines)) == {name.strip(): LETTERS}


def test_chain_names_of_two_letters(tmp_path: Path) -> None:
    """Catches chain PA of a file with long chain names whose ASP is read as ASPP of chain A."""
    lines = pdb_text(chain(NAMES)).split("\n")
    assert sequences(read(tmp_path, "\n".join(f"{line[:20]}P{line[21:]}" for line in lines))) == {"PA": LETTERS}


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
    residues = chain(NAMES)
    residues[2] = replace(
        residues[2], name=name, atoms=(*BACKBONE, *((one, 1, 1 + k) for k, one in enumerate(side, 1)))
    )
    found = read(tmp_path, TEXTS[form](residues), form)["A"]
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
    residues = chain(NAMES)
    residues[1] = replace(residues[1], atoms=(*BACKBONE, ("OQ9", 1, 2), ("HB1", 1, 3)))
    (note,) = read(tmp_path, pdb_text(residues))["A"].notes
    assert note == "atoms that no amino acid has under their names are left out: OQ9 of SER 2"


def models(*parts: list[Residue]) -> str:
    return "".join(f"MODEL {k:8}\n{pdb_text(part)[:-4]}ENDMDL\n" for k, part in enumerate(parts, 1)) + "END\n"


def test_models_with_other_chains(tmp_path: Path) -> None:
    """Catches all chains but the first model's lost where MODEL records hold an assembly; an NMR ensemble stays one chain."""
    other = chain(NAMES[3:], chain="B", row=1)
    found = read(tmp_path, models(chain(NAMES), other))
    assert sequences(found) == {"A": LETTERS, "B": LETTERS[3:]}
    assert found["A"].notes == ("the models of the file are parts of one assembly, and are read as its chains: A, B",)
    moved = [replace(one, row=1) for one in chain(NAMES)]
    assert list(read(tmp_path, models(chain(NAMES), moved))) == ["A", "A-2"]
    rows = [line for line in mmcif_text(moved).split("\n") if line.startswith("ATOM")]
    both = mmcif_text(chain(NAMES)) + "\n".join(row.removesuffix("1") + "2" for row in rows) + "\n"
    assert sequences(read(tmp_path, both, "cif")) == {"A": LETTERS, "A-2": LETTERS}
    bent = [replace(one, at=one.at + 0.01 * one.number**2, row=1) for one in chain(NAMES)]
    assert sequences(read(tmp_path, models(chain(NAMES), bent))) == {"A": LETTERS}
    ended = pdb_text(chain(NAMES)) + pdb_text(other)  # the first END is no end
    assert sequences(read(tmp_path, ended)) == {"A": LETTERS, "B": LETTERS[3:]}


LISTED = {"A": " ".join(f"{k}:{name}" for k, name in enumerate(NAMES, 1))}


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
        for one in chain(NAMES)
        for name, x, y in one.atoms
    ]


def test_listed_residue_without_its_number(tmp_path: Path) -> None:
    """Catches a listed residue masked because its atoms have no label_seq_id; a free ligand of that name stays one."""
    het = {"label_seq_id": ".", "group_PDB": "HETATM"}
    for changes in (het, {**het, "label_asym_id": "C"}):
        found = read(tmp_path, entry(LISTED, listed_atoms(8, **changes)), "cif")["A"]
        assert found.sequence == LETTERS
        assert_in_place(found)
    free = [atom("CA", "ALA", 301, 90, label_asym_id="C", **het)]
    assert read(tmp_path, entry(LISTED, [*listed_atoms(), *free]), "cif")["A"].sequence == LETTERS


def test_listed_chain_with_names_of_a_force_field(tmp_path: Path) -> None:
    """Catches HSD of a listed mmCIF file read as X."""
    listed = {"A": LISTED["A"].replace("HIS", "HSD")}
    found = read(tmp_path, entry(listed, listed_atoms(3, label_comp_id="HSD")), "cif")["A"]
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
    found = read(
        tmp_path, without(mmcif_text([*chain(NAMES), *chain(NAMES, chain="B", row=1)]), *columns.split()), "cif"
    )
    assert sequences(found) == {"A": LETTERS, "B": LETTERS}
    assert_in_place(found["B"], 20.0)


@pytest.mark.parametrize("column", ["label_atom_id", "label_comp_id", "Cartn_z"])
def test_a_needed_column_is_named(tmp_path: Path, column: str) -> None:
    """Catches a message without a reason, and z read as 0."""
    with pytest.raises(UserError, match=rf"no column _atom_site\.{column}; add it"):
        read(tmp_path, without(mmcif_text(chain(NAMES)), column), "cif")


def test_polymer_of_nucleotides_with_a_ligand(tmp_path: Path) -> None:
    """Catches listed RNA read as a chain of X because an amino acid lies beside it."""
    bases = [replace(one, atoms=(("P", 0, 0), ("N1", 1, 1))) for one in chain(("A", "G", "C"), chain="R", row=1)]
    free = [Residue("GLY", 99, 40, chain="R", het=True, row=9)]
    text = pdb_text([*chain(NAMES), "TER", *bases, "TER", *free], SEQRES + "SEQRES   1 R    3    A   G   C\n")
    assert sequences(read(tmp_path, text)) == {"A": LETTERS}
    assert read_chain(tmp_path / "1abc.pdb", "A").mask.sum() == 36
