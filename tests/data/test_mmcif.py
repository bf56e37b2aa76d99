"""Parsing of structure files: every convention on a small entry, then golden parity on real entries."""

from __future__ import annotations

import gzip
import json
from datetime import date
from pathlib import Path

import gemmi
import numpy as np
import pytest

from evodsp.data.formats.mmcif import MOST_COPIES, read_assembly, read_chain, read_confidence, read_structure
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import ATOM_ORDER, encode
from tests.builders.mmcif import atom, entry
from tests.shared import load


def save(tmp_path: Path, text: str, name: str = "test.cif") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def x_of(chain, residue: int, name: str) -> float | None:
    column = ATOM_ORDER[name]
    return float(chain.positions[residue, column, 0]) if chain.mask[residue, column] else None


def test_header_and_missing_residues(tmp_path: Path):
    """Catches ATOM records read instead of SEQRES, the latest revision taken for the release, missing residues dropped."""
    atoms = [
        atom("CA", "GLY", 2, 1.5, auth_seq_id=-3, pdbx_PDB_ins_code="B"),
        atom("N", "LYS", 4, 7.25, auth_seq_id=12),
    ]
    structure = read_structure(save(tmp_path, entry({"A": "1:MET 2:GLY 3:SER 4:LYS"}, atoms)))
    assert (structure.pdb_id, structure.method, structure.resolution) == ("test", "x-ray diffraction", 2.05)
    assert structure.release_date == date(2002, 3, 4)
    chain = structure.chains["A"]
    assert chain.key == "test_A"
    assert chain.sequence == "MGSK"
    assert chain.is_missing.tolist() == [True, False, True, False]
    assert chain.residue_number.tolist() == [0, -3, 0, 12]
    assert chain.insertion_code == ("", "B", "", "")
    assert chain.mask.sum() == 2
    assert chain.positions[chain.mask == 0].sum() == 0
    assert (x_of(chain, 1, "CA"), x_of(chain, 3, "N"), x_of(chain, 3, "CA")) == (1.5, 7.25, None)


def test_highest_occupancy_wins_and_ties_go_to_the_first(tmp_path: Path):
    """Catches location A (or the last one) taken always, and the choice made for a residue instead of for each atom."""
    atoms = [
        atom("CA", "SER", 1, 1, label_alt_id="A", occupancy=0.3),
        atom("CA", "SER", 1, 2, label_alt_id="B", occupancy=0.7),
        atom("CB", "SER", 1, 3, label_alt_id="A", occupancy=0.5),
        atom("CB", "SER", 1, 4, label_alt_id="B", occupancy=0.5),
        atom("OG", "SER", 1, 5, label_alt_id="A", occupancy=0.0),
        atom("O", "SER", 1, 6, occupancy="?"),
    ]
    chain = read_chain(save(tmp_path, entry({"A": "1:SER"}, atoms)), "A")
    assert [x_of(chain, 0, name) for name in ("CA", "CB", "OG", "O")] == [2, 3, 5, 6]


def test_microheterogeneity_keeps_one_residue(tmp_path: Path):
    """Catches a position with two monomers counted twice (all later residues shift) or atoms of both mixed in one residue."""
    atoms = [
        atom("N", "GLY", 1, 0),
        atom("CA", "SER", 2, 1, label_alt_id="A", occupancy=0.4),
        atom("OG", "SER", 2, 2, label_alt_id="A", occupancy=0.4),
        atom("CA", "THR", 2, 3, label_alt_id="B", occupancy=0.6),
        atom("OG1", "THR", 2, 4, label_alt_id="B", occupancy=0.6),
        atom("CA", "TRP", 3, 5),
    ]
    chain = read_chain(save(tmp_path, entry({"A": "1:GLY 2:SER 2:THR 3:TRP"}, atoms)), "A")
    assert chain.sequence == "GTW"
    assert [x_of(chain, 1, name) for name in ("CA", "OG", "OG1")] == [3, None, 4]
    assert x_of(chain, 2, "CA") == 5


def test_modified_residues(tmp_path: Path):
    """Catches selenium lost, HETATM residues of the polymer skipped, and parents of modified residues unknown."""
    het = {"group_PDB": "HETATM"}
    atoms = [
        atom("SE", "MSE", 1, 1, **het),
        atom("CA", "SEP", 2, 2, **het),
        atom("P", "SEP", 2, 3, **het),
        atom("CA", "ZZZ", 3, 4, **het),
        atom("SE", "CYS", 4, 5),
        atom("O", "HOH", ".", 6, **het),
    ]
    chain = read_chain(save(tmp_path, entry({"A": "1:MSE 2:SEP 3:ZZZ 4:CYS"}, atoms)), "A")
    assert chain.sequence == "MSXC"
    assert x_of(chain, 0, "SD") == 1
    assert x_of(chain, 1, "CA") == 2
    assert x_of(chain, 2, "CA") == 4
    assert chain.mask.sum(axis=1).tolist() == [1, 1, 1, 0]
    assert chain.is_missing.tolist() == [False] * 4


@pytest.mark.parametrize("swapped", [False, True])
def test_arginine_nitrogens_are_named_by_their_distance_to_cd(tmp_path: Path, swapped: bool):
    """Catches NH1 and NH2 left swapped, as in some entries, or swapped where they are correct."""
    near, far = ("NH2", "NH1") if swapped else ("NH1", "NH2")
    atoms = [atom("CD", "ARG", 1, 0), atom(near, "ARG", 1, 2), atom(far, "ARG", 1, 3), atom("NH2", "ARG", 2, 1)]
    chain = read_chain(save(tmp_path, entry({"A": "1:ARG 2:ARG"}, atoms)), "A")
    assert (x_of(chain, 0, "NH1"), x_of(chain, 0, "NH2"), x_of(chain, 1, "NH2")) == (2, 3, 1)


def test_first_model_author_chains_and_only_proteins(tmp_path: Path):
    """Catches later NMR models overwriting the first, label ids used in place of the author's, ligands read as chains."""
    second = {"label_asym_id": "B", "auth_asym_id": "H"}
    atoms = [
        atom("CA", "GLY", 1, 1, auth_asym_id="L", pdbx_PDB_model_num=3),
        atom("CA", "ALA", 1, 2, pdbx_PDB_model_num=3, **second),
        atom("C1", "LIG", ".", 9, label_asym_id="C", auth_asym_id="L", pdbx_PDB_model_num=3),
        atom("CA", "GLY", 1, 3, auth_asym_id="L", pdbx_PDB_model_num=4),
        atom("CA", "ALA", 1, 4, pdbx_PDB_model_num=4, **second),
    ]
    path = save(tmp_path, entry({"A": "1:GLY", "B": "1:ALA"}, atoms, header="data_T\n_exptl.method 'SOLUTION NMR'\n"))
    structure = read_structure(path)
    assert {name: (c.sequence, x_of(c, 0, "CA")) for name, c in structure.chains.items()} == {
        "L": ("G", 1),
        "H": ("A", 2),
    }
    assert (structure.resolution, structure.method, structure.release_date) == (None, "solution nmr", None)
    with pytest.raises(UserError, match=r"no protein chain 'A'.*Chains: H, L"):
        read_chain(path, "A")


def test_dna_is_not_a_protein_chain(tmp_path: Path):
    """Catches nucleic acids read as chains of X."""
    path = save(tmp_path, entry({"A": "1:DA"}, [atom("P", "DA", 1, 1)], kind="polydeoxyribonucleotide"))
    with pytest.raises(UserError, match="no protein chain with coordinates"):
        read_structure(path)


def test_chains_of_glycine_alone(tmp_path: Path) -> None:
    """Catches a predicted chain that is lost because python-modelcif calls it `other`, and other polymers read as proteins."""
    atoms = [atom("CA", "GLY", 1, 1), atom("CA", "GLY", 2, 2)]
    path = save(tmp_path, entry({"A": "1:GLY 2:GLY"}, atoms, kind="other"))
    assert {name: chain.sequence for name, chain in read_structure(path).chains.items()} == {"A": "GG"}
    path = save(tmp_path, entry({"A": "1:GLY 2:GPN"}, atoms, kind="other"))  # GPN: of a peptide nucleic acid
    with pytest.raises(UserError, match="no protein chain with coordinates"):
        read_structure(path)


def test_electron_microscopy_resolution(tmp_path: Path):
    """Catches a resolution read only from the X-ray category."""
    header = (
        "data_T\n_exptl.method 'ELECTRON MICROSCOPY'\n_refine.ls_d_res_high ?\n_em_3d_reconstruction.resolution 3.4\n"
    )
    assert read_structure(save(tmp_path, entry({"A": "1:GLY"}, [atom("CA", "GLY", 1, 1)], header))).resolution == 3.4


def test_quoted_values_and_standard_deviations(tmp_path: Path):
    """Catches quotes kept in atom names and coordinates with a standard deviation refused."""
    atoms = [atom("'CA'", '"GLY"', 1, 1.0, Cartn_x="1.250(3)")]
    assert x_of(read_chain(save(tmp_path, entry({"A": "1:GLY"}, atoms)), "A"), 0, "CA") == 1.25


PDB_ATOM = (
    "ATOM  {serial:5d}  {name:<3} {residue} {chain}{number:4d}{code}   {x:8.3f}   0.000   0.000"
    "  1.00 50.00           {name[0]}"
)


def test_pdb_with_and_without_seqres(tmp_path: Path):
    """Catches PDB files read without their SEQRES (missing residues vanish) or refused when they have none."""
    residues = [("GLY", 1, " "), ("SER", 1, "A"), ("LYS", 4, " ")]
    lines = [
        PDB_ATOM.format(serial=3 * k + a + 1, name=name, residue=r, chain="B", number=n, code=code, x=k + a / 10)
        for k, (r, n, code) in enumerate(residues)
        for a, name in enumerate(("N", "CA", "C"))
    ]
    atoms = "\n".join(lines) + "\nTER\nEND\n"
    chain = read_chain(save(tmp_path, atoms, "a.pdb"), "B")
    assert (chain.sequence, chain.key) == ("GSK", "a_B")
    assert chain.residue_number.tolist() == [1, 1, 4]
    assert chain.insertion_code == ("", "A", "")
    with_seqres = "SEQRES   1 B    5  MET GLY SER TRP LYS\n" + atoms
    chain = read_chain(save(tmp_path, with_seqres, "b.pdb"), "B")
    assert chain.sequence == "MGSWK"
    assert chain.is_missing.tolist() == [True, False, False, True, False]
    assert x_of(chain, 4, "CA") == pytest.approx(2.1)


@pytest.mark.parametrize("first", [1, 9, 100, 9998])
def test_numbered_lines_of_old_pdb_files(tmp_path: Path, first: int):
    """Catches entries of before 1996 refused as damaged: elements and charges were an entry's name and a line's number."""
    atoms = [
        PDB_ATOM.format(serial=k, name=name, residue="GLY", chain="A", number=1, code=" ", x=k)
        for k, name in enumerate(("N", "CA"), 1)
    ]
    old = "\n".join(f"{line[:66]:72}1ABC{number:4}" for number, line in enumerate(atoms, first))
    chain = read_chain(save(tmp_path, old + "\nEND\n", "a.pdb"), "A")
    assert (chain.sequence, x_of(chain, 0, "CA")) == ("G", 2)


def test_confidence_of_a_chain_that_is_not_there(tmp_path: Path):
    """Catches a KeyError in place of the list of chains."""
    path = tmp_path / "a.cif"
    path.write_text(entry({"A": "1:GLY"}, [atom("CA", "GLY", 1, 1)]))
    with pytest.raises(UserError, match=r"no protein chain 'Q'\. Chains: A; give one of these"):
        read_confidence(path, "Q")


def test_coordinates_are_within_reach(tmp_path: Path):
    """Catches a coordinate of 1e8 Å, which float32 holds to 8 Å, in a sample or a template."""
    path = tmp_path / "a.cif"
    for x, refused in ((99_999, False), (-1e8, True), (1e8, True)):
        path.write_text(entry({"A": "1:GLY"}, [atom("CA", "GLY", 1, x)]))
        if not refused:
            assert x_of(read_chain(path, "A"), 0, "CA") == pytest.approx(x, abs=0.01)
            continue
        with pytest.raises(
            UserError, match=r"a\.cif: atom CA of GLY 1 is at 1e\+08 Å, but coordinates reach at most 100,000 Å"
        ):
            read_chain(path, "A")


def test_messages_quote_little_of_a_file(tmp_path: Path):
    """Catches a message as long as the broken value that it names."""
    path = tmp_path / "a.cif"
    path.write_text(entry({"A": "1:GLY"}, [atom("CA", "GLY", 1, "1" + 5000 * "x")]))
    with pytest.raises(UserError, match=r"Cartn_x of atom row 1 is '1xxx.*, not a number") as caught:
        read_chain(path, "A")
    assert len(str(caught.value)) < 300


def test_gzipped_file_and_its_name(tmp_path: Path):
    """Catches compressed archives refused, and '.cif' left in the entry's id."""
    path = tmp_path / "1abc.cif.gz"
    path.write_bytes(gzip.compress(entry({"A": "1:GLY"}, [atom("CA", "GLY", 1, 1)]).encode()))
    assert read_chain(path, "A").key == "1abc_A"


ENTRIES = ["1psm", "2crb", "2q2k", "3u8v", "3zee", "4i6p", "4zey", "5kc1"]


@pytest.mark.parametrize("pdb_id", ENTRIES)
def test_golden_parity(golden: Path, real_data: Path, pdb_id: str):
    """Catches any difference from AF2's mmCIF reader on real entries (X-ray, NMR, EM): exactly, every chain."""
    summary = json.loads(gzip.decompress((golden / "featurization" / "mmcif_summary.json.gz").read_bytes()))[pdb_id]
    expected = load(golden / "featurization" / f"mmcif_{pdb_id}.npz")
    path = real_data / "mmcif_files" / f"{pdb_id}.cif"
    structure = read_structure(path)
    header = summary["header"]
    assert structure.method == header["structure_method"]
    assert (structure.resolution or 0.0) == header["resolution"]
    assert str(structure.release_date) == header["release_date"]
    assert set(structure.chains) == set(summary["chains"])
    for name, chain in structure.chains.items():
        missing = expected[f"{name}/is_missing"] == 1
        assert chain.sequence == summary["chains"][name]["seqres"]
        np.testing.assert_array_equal(encode(chain.sequence), expected[f"{name}/aatype"])
        np.testing.assert_array_equal(chain.is_missing, missing)
        np.testing.assert_array_equal(chain.residue_number, np.where(missing, 0, expected[f"{name}/residue_number"]))
        codes = [code.decode().strip(" ?") for code in expected[f"{name}/insertion_code"]]
        assert list(chain.insertion_code) == codes
        np.testing.assert_array_equal(chain.mask, expected[f"{name}/all_atom_mask"])
        np.testing.assert_array_equal(chain.positions, expected[f"{name}/all_atom_positions"])
    last = read_chain(path, name)
    np.testing.assert_array_equal(last.positions, chain.positions)


# Biological assemblies of mmCIF files: copies of chains, each in its place.


ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "data" / "mmcif_files" / "s001.cif"


def operator(name: str, angle: float, shift: tuple[float, float, float]) -> str:
    """A rotation about z by `angle` (degrees) and a shift, as a row of the list of operators."""
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    matrix = [cos, -sin, 0, sin, cos, 0, 0, 0, 1]
    return " ".join([name, "?", *(f"{x:.9f}" for x in (*matrix, *shift))])


def with_assemblies(folder: Path, generators: list[str], operators: list[str]) -> Path:
    """The bundled entry with a list of assemblies."""
    numbers = [f"matrix[{row}][{column}]" for row in (1, 2, 3) for column in (1, 2, 3)]
    tags = ["id", "type", *numbers, *(f"vector[{row}]" for row in (1, 2, 3))]
    listed = "id", "details", "method_details", "oligomeric_details", "oligomeric_count"  # gemmi needs all of them
    text = ENTRY.read_text().rstrip() + "\n#\nloop_\n"
    text += "".join(f"_pdbx_struct_assembly.{tag}\n" for tag in listed) + "1 ? ? ? ?\n#\nloop_\n"
    text += "".join(f"_pdbx_struct_assembly_gen.{tag}\n" for tag in ("assembly_id", "oper_expression", "asym_id_list"))
    text += "\n".join(generators) + "\n#\nloop_\n"
    text += "".join(f"_pdbx_struct_oper_list.{tag}\n" for tag in tags) + "\n".join(operators) + "\n#\n"
    path = folder / "1abc.cif"
    path.write_text(text)
    return path


OPERATORS = [
    operator("1", 0, (0, 0, 0)),
    operator("2", 180, (50, 0, 0)),
    operator("3", 90, (0, 7, 1)),
    operator("P", 30, (1, 2, 3)),
]


@pytest.mark.parametrize("expression", ["1", "1,2", "'1,2,3'", "1-3", "'(1-3)'", "P"])
def test_copies_lie_where_gemmi_puts_them(expression: str, tmp_path: Path) -> None:
    """Catches a range without its end, and a rotation that is transposed. (gemmi 0.7 takes the first list of a product.)"""
    path = with_assemblies(tmp_path, [f"1 {expression} A"], OPERATORS)
    found = read_assembly(path)
    structure = gemmi.read_structure(str(path))
    structure.merge_chain_parts()
    expected = gemmi.make_assembly(structure.assemblies[0], structure[0], gemmi.HowToNameCopiedChain.AddNumber)
    assert len(found.chains) == len(expected)
    theirs = [
        np.array([residue.find_atom("CA", "*").pos.tolist() for residue in chain if residue.find_atom("CA", "*")])
        for chain in expected
    ]
    for chain, positions in zip(found.chains, theirs, strict=True):
        np.testing.assert_allclose(chain.positions[chain.mask[:, 1] > 0, 1], positions, atol=2e-4)


def test_products_of_operators_are_applied_from_right_to_left(tmp_path: Path) -> None:
    """Catches a product in the wrong order, and products in an order that is not that of the lists."""
    found = read_assembly(with_assemblies(tmp_path, ["1 '(2,3)(1,P)' A"], OPERATORS))
    unit = read_assembly(ENTRY).chains[0]
    start = unit.positions[unit.mask > 0].astype(float)

    def moved(points: np.ndarray, row: str) -> np.ndarray:
        numbers = np.array(row.split()[2:], float)
        return points @ numbers[:9].reshape(3, 3).T + numbers[9:]

    _, two, three, p = OPERATORS
    expected = [moved(start, two), moved(moved(start, p), two), moved(start, three), moved(moved(start, p), three)]
    for chain, points in zip(found.chains, expected, strict=True):
        np.testing.assert_allclose(chain.positions[chain.mask > 0], points, atol=1e-4)


def test_copies_have_names_and_places_of_their_own(tmp_path: Path) -> None:
    """Catches the coordinates of the first copy in all of them, and copies of one name."""
    found = read_assembly(with_assemblies(tmp_path, ["1 1-2 A"], OPERATORS))
    assert found.names == ("A", "A-2")
    assert found.entities == (0, 0)
    assert [chain.key for chain in found.chains] == ["1abc_A", "1abc_A"]
    first, second = (chain.positions[chain.mask > 0] for chain in found.chains)
    np.testing.assert_allclose(second, first * [-1, -1, 1] + [50, 0, 0], atol=1e-4)
    assert not found.chains[1].positions[found.chains[1].mask == 0].any()
    assert len(found) == 2 * len(found.chains[0])


def test_the_asymmetric_unit_is_a_choice_and_the_rule_without_assemblies(tmp_path: Path) -> None:
    """Catches operators that are applied where they were not asked for, and an error for a predicted model."""
    path = with_assemblies(tmp_path, ["1 1-2 A"], OPERATORS)
    chain = read_structure(path).chains["A"]
    for found in (read_assembly(path, None), read_assembly(ENTRY)):
        assert found.names == ("A",)
        np.testing.assert_array_equal(found.chains[0].positions, chain.positions)


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        (["1 1-999999999 A"], "no expression of operators"),
        (["1 '(1-900)(1-900)' A"], "more than 1,000 operators"),
        (["1 '(1' A"], "no expression of operators"),
        (["1 1,,2 A"], "no expression of operators"),
        (["1 7 A"], "operator '7', which the file does not list"),
        (["2 1 A"], "no assembly '1': its assemblies are 2"),
        (["1 1 Z"], "no protein chain"),
        ([f"1 1 {','.join(['A'] * (MOST_COPIES + 1))}"], "more than 1,000 copies"),
    ],
)  # fmt: skip
def test_a_wrong_list_of_assemblies_is_one_line(generators: list[str], message: str, tmp_path: Path) -> None:
    """Catches a file that fills the memory or hangs, and a message without the file's name."""
    path = with_assemblies(tmp_path, generators, OPERATORS)
    with pytest.raises(FileFormatError, match=message) as error:
        read_assembly(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("matrix", ["2 0 0 0 1 0 0 0 1", "-1 0 0 0 -1 0 0 0 -1"])
def test_an_operator_that_is_no_rotation_is_refused(matrix: str, tmp_path: Path) -> None:
    """Catches coordinates that are stretched or not numbers, and chains of the other hand."""
    path = with_assemblies(tmp_path, ["1 S A"], [f"S ? {matrix} 0 0 0"])
    with pytest.raises(FileFormatError, match="operator 'S' of _pdbx_struct_oper_list is no rotation"):
        read_assembly(path)
