"""Files of predicted structures, read back by other programs."""

from __future__ import annotations

import io
from dataclasses import replace

import gemmi
import modelcif.dumper
import modelcif.reader
import numpy as np
import pytest
from Bio.PDB.MMCIFParser import MMCIFParser
from Bio.PDB.PDBParser import PDBParser

from evodsp.data.formats.mmcif import read_chain
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_TYPES, RESTYPE_ATOM37_MASK
from evodsp.inference.structure_files import AlignedError, Origin, PredictedStructure, structure_text
from evodsp.version import REPOSITORY

FORMATS = ("cif", "pdb")


def structure(length: int = 25, name: str = "target_1", missing: bool = True) -> PredictedStructure:
    """All residue types including X. With `missing`, one residue and some atoms are missing."""
    rng = np.random.default_rng(0)
    aatype = (np.arange(length) % 21).astype(np.int32)
    mask = RESTYPE_ATOM37_MASK[aatype].astype(np.float32)
    if missing:
        mask[4] = 0
        mask[7, ATOM_TYPES.index("CB")] = 0
    positions = (rng.normal(size=(length, 37, 3)) * 40).astype(np.float32)
    # Readers exchange arginine's NH1 and NH2 if NH2 is nearer to CD.
    positions[:, ATOM_TYPES.index("NH1")] = positions[:, ATOM_TYPES.index("CD")] + 1
    plddt = rng.uniform(0, 100, length).astype(np.float32)
    return PredictedStructure(name, aatype, positions, mask, plddt)


def expected_atoms(s: PredictedStructure) -> dict[tuple[int, str], np.ndarray]:
    """From (residue number, atom) to x, y, z, B-factor."""
    return {
        (int(r) + 1, ATOM_TYPES[a]): np.array([*s.positions[r, a], s.plddt[r]])
        for r, a in zip(*np.nonzero(s.mask), strict=True)
    }


def gemmi_structure(text: str, file_format: str) -> gemmi.Structure:
    if file_format == "cif":
        return gemmi.make_structure_from_block(gemmi.cif.read_string(text).sole_block())
    return gemmi.read_pdb_string(text)


def read_by_gemmi(text: str, file_format: str) -> dict[tuple[int, str], np.ndarray]:
    chain = gemmi_structure(text, file_format)[0]["A"]
    assert {a.element.name == a.name[0] for r in chain for a in r} == {True}
    return {(r.seqid.num, a.name): np.array([*a.pos.tolist(), a.b_iso]) for r in chain for a in r}


def read_by_biopython(text: str, file_format: str) -> dict[tuple[int, str], np.ndarray]:
    """It is stricter than gemmi."""
    parser = MMCIFParser(QUIET=True) if file_format == "cif" else PDBParser(QUIET=True, PERMISSIVE=False)
    model = parser.get_structure("x", io.StringIO(text))[0]
    return {(a.get_parent().id[1], a.get_name()): np.array([*a.coord, a.bfactor]) for a in model["A"].get_atoms()}


@pytest.mark.parametrize("read", [read_by_gemmi, read_by_biopython])
@pytest.mark.parametrize("file_format", FORMATS)
def test_others_read_every_atom_back(file_format, read):
    """Catches a shifted column, a lost atom, and another residue's B-factor."""
    found, wanted = read(structure_text(structure(), file_format), file_format), expected_atoms(structure())
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        np.testing.assert_allclose(found[key][:3], numbers[:3], atol=1e-3)
        np.testing.assert_allclose(found[key][3], numbers[3], atol=6e-3)


@pytest.mark.parametrize("file_format", FORMATS)
def test_own_reader_gets_the_whole_sequence(file_format, tmp_path):
    """Catches residues without atoms lost from the sequence: scores would compare shifted residues; and a single residue that
    is written as a ligand, which no reader of proteins finds."""
    s = structure()
    path = tmp_path / f"target.{file_format}"
    path.write_text(structure_text(s, file_format))
    chain = read_chain(path, "A")
    assert chain.sequence == s.sequence
    np.testing.assert_array_equal(chain.mask, s.mask)
    np.testing.assert_allclose(chain.positions[s.mask > 0], s.positions[s.mask > 0], atol=1e-3)
    one = replace(s, aatype=s.aatype[:1], positions=s.positions[:1], mask=s.mask[:1], plddt=s.plddt[:1])
    path.write_text(structure_text(one, file_format))
    assert read_chain(path, "A").sequence == s.sequence[0]


def test_pdb_columns():
    """Catches fields outside of the fixed columns of PDB format 3.3."""
    s = structure()
    lines = structure_text(s, "pdb").splitlines()
    assert {len(line) for line in lines} == {80}
    atoms = [line for line in lines if line.startswith("ATOM")]
    assert len(atoms) == int(s.mask.sum())
    for serial, line in enumerate(atoms, start=1):
        assert int(line[6:11]) == serial
        assert line[12] == " "
        assert line[21] == "A"
        assert line[54:60] == "  1.00"
        assert line[76:78].strip() == line[13]
        assert line[78:80] == "  "
    assert [line[:6].strip() for line in lines[-2:]] == ["TER", "END"]
    assert int(lines[-2][6:11]) == len(atoms) + 1
    assert lines[-2][17:26] == atoms[-1][17:26]


def test_pdb_seqres_lists_all_residues():
    """Catches missing residues or UNK lost from SEQRES, and another layout than 13 names per line."""
    s = structure(31)
    rows = [line for line in structure_text(s, "pdb").splitlines() if line.startswith("SEQRES")]
    assert [int(row[7:10]) for row in rows] == [1, 2, 3]
    assert {int(row[13:17]) for row in rows} == {31}
    names = [name for row in rows for name in row[19:].split()]
    assert len(names) == 31
    assert names[20] == "UNK"


def test_mmcif_confidence_items():
    """Catches residues missing or repeated in _ma_qa_metric_local, by which viewers colour."""
    s = structure()
    block = gemmi.cif.read_string(structure_text(s, "cif")).sole_block()
    local = block.find("_ma_qa_metric_local.", ["label_seq_id", "metric_value", "metric_id"])
    assert [int(row[0]) for row in local] == list(range(1, 26))
    np.testing.assert_allclose([float(row[1]) for row in local], s.plddt, atol=6e-3)
    metrics = {row[0]: row[1] for row in block.find("_ma_qa_metric.", ["id", "mode"])}
    assert {metrics[row[2]] for row in local} == {"local"}
    assert float(block.find_value("_ma_qa_metric_global.metric_value")) == pytest.approx(s.mean_plddt, abs=6e-3)


def test_mmcif_lists_residues_without_atoms():
    """Catches neighbours of a residue without atoms that the file says are missing too, and X that it says is there."""
    s = structure()
    block = gemmi.cif.read_string(structure_text(s, "cif")).sole_block()
    rows = block.find("_pdbx_poly_seq_scheme.", ["seq_id", "auth_seq_num", "auth_mon_id"])
    missing = [int(row[0]) for row in rows if row[1] == "?" and row[2] == "?"]
    assert missing == [number + 1 for number in range(25) if not s.mask[number].any()] == [5, 21]
    assert [row[1] for row in rows if int(row[0]) not in missing] == [
        row[0] for row in rows if int(row[0]) not in missing
    ]


ORIGIN = Origin(
    seed=3,
    ptm=0.71,
    settings={"checkpoint": "sha256:abc", "recycles": 3, "templates": ["1abc_A", "2def_B"], "alignments": "x"},
)


def test_python_modelcif_reads_it_and_writes_it_back() -> None:
    """Catches a file that another program of the dictionary reads differently: it would write another one."""
    text = structure_text(structure(), "cif", ORIGIN)
    (system,) = modelcif.reader.read(io.StringIO(text))
    again = io.StringIO()
    modelcif.dumper.write(again, [system])
    assert again.getvalue() == text
    ((model,),) = system.model_groups
    found = {(metric.mode, metric.name): metric.value for metric in model.qa_metrics if metric.mode == "global"}
    assert found == {("global", "pLDDT"): pytest.approx(structure().mean_plddt, abs=6e-3), ("global", "pTM"): 0.71}
    assert len(list(model.get_atoms())) == structure().mask.sum()


def test_the_file_says_how_it_was_made() -> None:
    """Catches a prediction of which nobody can tell later from which parameters it came."""
    block = gemmi.cif.read_string(structure_text(structure(), "cif", ORIGIN)).sole_block()
    parameters = dict(list(row) for row in block.find("_ma_software_parameter.", ["name", "value"]))
    assert parameters == {
        "seed": "3",
        "checkpoint": "sha256:abc",
        "recycles": "3",
        "templates": "'1abc_A, 2def_B'",
    }
    assert list(block.find_loop("_ma_protocol_step.method_type")) == ["modeling"]
    assert list(block.find_loop("_software.name")) == ["evodsp"]
    assert list(block.find_loop("_software.location")) == [REPOSITORY or "."], "a place that is not there"


@pytest.mark.parametrize("file_format", FORMATS)
def test_same_structure_same_bytes(file_format):
    """Catches dates, set order or host names in files."""
    assert structure_text(structure(), file_format) == structure_text(structure(), file_format)


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(
    "name", ["sp|P00001|CYC_HUMAN", "it's", 'a"b', "data_x#1", "näme", "$(x", "#1", "]x", "LOOP_1"]
)
def test_odd_names(file_format, name):
    """Catches names that break the file's syntax: quotes, bars, and what no value of CIF may begin with."""
    text = structure_text(structure(name=name), file_format)
    assert len(gemmi_structure(text, file_format)[0]["A"]) == 23


@pytest.mark.parametrize("where", ["plddt", "row", "column"])
def test_nan_in_the_confidence_of_a_residue_without_atoms(where):
    """Catches a traceback of the JSON writer: the confidence of an X is written too, so NaN must be found there."""
    s = structure()
    assert not s.mask[4].any()
    s = replace(s, aligned_error=AlignedError(np.ones((25, 25), np.float32), 31.75, 0.5))
    assert s.aligned_error is not None
    structure_text(s, "cif")
    values = s.plddt if where == "plddt" else s.aligned_error.pae
    values[(slice(None), 4) if where == "column" else 4] = np.nan
    with pytest.raises(UserError, match=rf"residue {1 if where == 'column' else 5} .*checkpoint"):
        structure_text(s, "cif")


@pytest.mark.parametrize("file_format", FORMATS)
def test_atoms_that_no_file_can_have(file_format):
    """Catches a file full of 'nan' from a diverged model, an error about those of absent atoms, and an empty file for a query
    that consists of X only."""
    s = structure()
    s.positions[4] = np.nan
    assert "nan" not in structure_text(s, file_format).lower().split()
    s.positions[9, 1, 2] = np.nan
    with pytest.raises(UserError, match=r"residue 10 .*checkpoint"):
        structure_text(s, file_format)
    s.mask[:] = 0
    with pytest.raises(UserError, match="no atoms"):
        structure_text(s, file_format)


def test_pdb_limits_suggest_cif():
    """Catches numbers too wide for PDB's columns, which would shift all later fields."""
    with pytest.raises(UserError, match=r"10,000 residues.*--format cif"):
        structure_text(structure(10_000), "pdb")
    crowded = structure(9_999, missing=False)
    crowded.aatype[:] = 17  # tryptophan: 14 atoms
    crowded.mask[:] = RESTYPE_ATOM37_MASK[17]
    with pytest.raises(UserError, match=r"139,986 atoms.*--format cif"):
        structure_text(crowded, "pdb")
    far = structure()
    far.positions[0, 1, 0] = -1234.5
    with pytest.raises(UserError, match=r"-1234\.500 .*--format cif"):
        structure_text(far, "pdb")


@pytest.mark.verify
def test_largest_pdb_numbers_fit():
    """Catches refused numbers that still fit into PDB's columns."""
    s = structure(9_999)
    s.positions[0, 1] = (9999.999, -999.999, -0.0001)
    lines = structure_text(s, "pdb").splitlines()
    assert {len(line) for line in lines} == {80}
    ca = next(line for line in lines if line.startswith("ATOM") and line[12:16] == " CA ")
    assert ca[30:54] == "9999.999-999.999   0.000"
