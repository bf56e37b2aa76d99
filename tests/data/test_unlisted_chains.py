"""Structure files without SEQRES: one sequence for each author chain, from its amino acids in the order of the file."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.doctor.examination import Examiner
from evodsp.data.formats.mmcif import read_chain, read_structure
from evodsp.data.records import Alignment, Chain, ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.features import Match, match_hit
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER
from tests.builders.backbone import Residue, chain, ligand, mmcif_text, pdb_text
from tests.builders.mmcif import atom, entry
from tests.builders.templates import make_hit

NAMES = ("GLY", "SER", "MET", "LYS", "TRP", "ALA")
TEXTS = {"pdb": pdb_text, "cif": mmcif_text}
forms = pytest.mark.parametrize("form", TEXTS)


def read(tmp_path: Path, form: str, residues: list[Residue]) -> dict[str, Chain]:
    path = tmp_path / f"1abc.{form}"
    path.write_text(TEXTS[form](residues))
    return read_structure(path).chains


def sequences(chains: dict[str, Chain]) -> dict[str, str]:
    return {name: chain.sequence for name, chain in chains.items()}


@forms
def test_hetatm_inside_a_chain(tmp_path: Path, form: str) -> None:
    """Catches a chain that ends at its first HETATM (files without TER, or with a label_asym_id for each run of residues)."""
    residues = chain(("GLY", "SER", "MSE", "LYS", "SEP", "ALA", "TRP"))
    residues = [replace(r, het=r.name in ("MSE", "SEP", "LYS"), label="ABCDEFG"[k]) for k, r in enumerate(residues)]
    (found,) = read(tmp_path, form, [*residues, ligand("HOH", 301, atoms=(("O", 0, 0),))]).values()
    assert found.sequence == "GSMKSAW"
    assert found.residue_number.tolist() == list(range(1, 8))
    assert not found.is_missing.any()
    assert found.mask.sum() == 21
    np.testing.assert_allclose(found.positions[:, ATOM_ORDER["N"], 0], 3.8 * np.arange(7), rtol=1e-6)


@forms
def test_each_chain_has_its_own_residues(tmp_path: Path, form: str) -> None:
    """Catches copies of a protein that are given the first one's sequence: residues that it lacks are lost."""
    whole = chain(NAMES, chain="B", row=1)
    chains = read(tmp_path, form, [r for r in chain(NAMES) if r.number not in (3, 4)] + whole)
    assert sequences(chains) == {"A": "GSWA", "B": "GSMKWA"}
    assert chains["B"].mask.sum() == 18
    assert chains["A"].residue_number.tolist() == [1, 2, 5, 6]


@forms
def test_waters_and_ligands_are_no_residues(tmp_path: Path, form: str) -> None:
    """Catches waters read as X, files with them refused, and a free glycine or a ligand with N, CA and C in the chain."""
    others = [
        ligand("HOH", 1001, atoms=(("O", 0, 0),)),
        ligand("GLY", 1002, row=3),
        ligand("LIG", 1003, row=4),
        ligand("HEM", 1004, row=5, atoms=(("FE", 0, 0), ("CA", 1, 0))),
        ligand("SER", 1005, row=6, atoms=(("N", 0, 0), ("CA", 1.2, 0.8))),
    ]
    (found,) = read(tmp_path, form, chain(NAMES) + others).values()
    assert found.sequence == "GSMKWA"
    assert found.notes == (
        "residues with N, CA and C that no peptide bond joins to chain 'A' are left out: GLY 1002, LIG 1003",
    )


@forms
def test_modified_bases_are_no_residues(tmp_path: Path, form: str) -> None:
    """Catches an RNA chain read as a protein: AlphaFold2's table of letters, of which G and U are some, has bases too."""
    bases = [
        replace(r, atoms=(("P", 0, 0), ("N1", 1, 1), ("C4", 2, 0))) for r in chain(("PSU", "2MG"), chain="R", row=1)
    ]
    assert sequences(read(tmp_path, form, chain(NAMES) + bases)) == {"A": "GSMKWA"}


@forms
def test_imgt_numbers_run_backwards(tmp_path: Path, form: str) -> None:
    """Catches residues sorted by their numbers: IMGT's CDR3 is 110, 111, 111A, 112B, 112A, 112, 113."""
    numbers = [(110, ""), (111, ""), (111, "A"), (112, "B"), (112, "A"), (112, ""), (113, "")]
    names = ("CYS", "ALA", "GLY", "SER", "TYR", "ASP", "PHE")
    residues = [Residue(n, number, k, code) for k, (n, (number, code)) in enumerate(zip(names, numbers, strict=True))]
    (found,) = read(tmp_path, form, residues).values()
    assert found.sequence == "CAGSYDF"
    assert list(zip(found.residue_number.tolist(), found.insertion_code, strict=True)) == numbers
    assert found.notes == ()


@forms
def test_kabat_numbers_jump(tmp_path: Path, form: str) -> None:
    """Catches a jump of numbers, as from Kabat's 27 to 28 by 27A to 27F, or from 8 to 11, taken for a break."""
    numbers = [(8, ""), (11, ""), (27, ""), (27, "A"), (27, "F"), (28, "")]
    residues = [Residue(n, number, k, code) for k, (n, (number, code)) in enumerate(zip(NAMES, numbers, strict=True))]
    (found,) = read(tmp_path, form, residues).values()
    assert (found.sequence, found.insertion_code) == ("GSMKWA", ("", "", "", "A", "F", ""))
    assert found.notes == ()


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


@forms
def test_modified_residues_listed_last(tmp_path: Path, form: str) -> None:
    """Catches a bonded HETATM that is lost, or put at the chain's end, where a program lists all HETATM behind the others."""
    residues = chain(("GLY", "SER", "MSE", "ZZ9", "TRP", "ALA"))
    moved = [*residues[:2], *residues[4:], ligand("GLY", 99), *(replace(r, het=True) for r in residues[2:4])]
    (found,) = read(tmp_path, form, moved).values()
    assert (found.sequence, found.residue_number.tolist()) == ("GSMXWA", [1, 2, 3, 4, 5, 6])
    np.testing.assert_allclose(found.positions[:, ATOM_ORDER["N"], 0], 3.8 * np.arange(6), rtol=1e-6)


@forms
def test_all_residues_hetatm(tmp_path: Path, form: str) -> None:
    """Catches a chain refused whose program calls every residue HETATM."""
    (found,) = read(tmp_path, form, [*chain(NAMES, het=True), ligand("GLY", 99)]).values()
    assert found.sequence == "GSMKWA"


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


@forms
def test_trace_of_alpha_carbons(tmp_path: Path, form: str) -> None:
    """Catches residues lost that have no N and C."""
    residues = [replace(r, atoms=(("CA", 0, 0),), het=r.number == 3) for r in chain(NAMES)]
    (found,) = read(tmp_path, form, residues).values()
    assert (found.sequence, found.notes) == ("GSMKWA", ())


@forms
def test_dropped_insertion_codes(tmp_path: Path, form: str) -> None:
    """Catches neighbours of one number, whose insertion codes a program dropped, taken for two monomers at one place."""
    residues = [replace(r, number=(1, 2, 2, 2, 3, 4)[k]) for k, r in enumerate(chain(NAMES))]
    (found,) = read(tmp_path, form, residues).values()
    assert found.sequence == "GSMKWA"


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


@forms
def test_template_of_such_a_file(tmp_path: Path, form: str) -> None:
    """Catches templates that have the first piece of a chain only."""
    residues = [replace(r, het=r.number in (3, 4), label="ABCDEF"[r.number - 1]) for r in chain(NAMES)]
    read(tmp_path, form, residues)
    match = match_hit(make_hit("GSMKWA", "GSMKWA"), StructureFolder(tmp_path))
    assert isinstance(match, Match)
    assert match.index.tolist() == list(range(6))
    assert match.chain.mask.sum() == 18


def test_the_warning_and_what_the_doctor_hears(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches residues left out that nobody is told of, and the same line for each read of a file."""
    path = tmp_path / "1abc.pdb"
    path.write_text(pdb_text([*chain(NAMES), ligand("GLY", 99)]))
    (tmp_path / "alignments").mkdir()
    note = "residues with N, CA and C that no peptide bond joins to chain 'A' are left out: GLY 99"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read_chain(path, "A")
    assert caplog.messages == [f"{path}: {note}"]

    class Source(ChainFiles):
        def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
            return []

    assert Examiner(Source(tmp_path / "alignments", tmp_path)).examine("1abc_A").notes == (note,)
