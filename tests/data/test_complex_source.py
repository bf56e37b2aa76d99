"""Complexes read from files: the chains of an assembly, their alignments, and those that are paired."""

from __future__ import annotations

from pathlib import Path

import gemmi
import numpy as np
import pytest

from evodsp.data.complexes.merging import merge
from evodsp.data.complexes.source import BY_ENTRY, BY_SPECIES, ComplexFiles, PairingRule
from evodsp.data.formats.mmcif import read_structure
from evodsp.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
STRUCTURES = ROOT / "data" / "mmcif_files"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An entry of chains A, B, C of which A and B have one sequence, and alignments of A and C."""
    whole = gemmi.Structure()
    whole.name = "1abc"
    whole.add_model(gemmi.Model(1))
    for name, source in (("A", "s001"), ("B", "s001"), ("C", "s006")):
        chain = gemmi.read_structure(str(STRUCTURES / f"{source}.cif"))[0][0]
        chain.name = name
        for residue in chain:
            residue.subchain = name
            for atom in residue:
                atom.pos += gemmi.Position(40.0 * "ABC".index(name), 0, 0)
        whole[0].add_chain(chain)
    whole.setup_entities()
    whole.assign_label_seq_id()
    structures, alignments = tmp_path / "mmcif_files", tmp_path / "alignments"
    structures.mkdir()
    whole.make_mmcif_document().write_file(str(structures / "1abc.cif"))
    chains = read_structure(structures / "1abc.cif").chains
    for name, rows in (("A", "sp|P12345|RNAS1_BOVIN"), ("C", "sp|P54321|XYZ_BOVIN")):
        folder = alignments / f"1abc_{name}"
        folder.mkdir(parents=True)
        letters = chains[name].sequence
        changed = "W" + letters[1:]
        (folder / "family.a3m").write_text(
            f">1abc_{name}\n{letters}\n>2xyz_{name}\n{changed}\n>alone{name}\n{letters[:-1]}-\n"
        )
        (folder / "uniprot_hits.a3m").write_text(f">1abc_{name}\n{letters}\n>{rows}\n{letters[:-1]}W\n")
    return alignments, structures


def source(folders: tuple[Path, Path], rule: PairingRule = BY_SPECIES) -> ComplexFiles:
    return ComplexFiles(*folders, rule=rule)


@pytest.mark.parametrize(("rule", "changed"), [(BY_SPECIES, -1), (BY_ENTRY, 0)], ids=["species", "entry"])
def test_rows_are_paired_by_the_rule(folders: tuple[Path, Path], rule: PairingRule, changed: int) -> None:
    """Catches uniprot_hits that count as an alignment of the chain, and a rule that is not asked."""
    parsed = source(folders, rule).parsed("1abc")
    assert parsed.assembly.names == ("A", "B", "C")
    assert parsed.assembly.entities == (0, 0, 1)
    assert [len(chain.msa.msa) for chain in parsed.chains] == [3, 3, 3]
    merged = merge(parsed.chains)
    paired = merged.msa[merged.block == 0]
    assert len(paired) == 2
    first, second = (merged.ids.asym_id == number for number in (1, 3))
    for columns in (first, second):
        differs = np.flatnonzero(paired[0, columns] != paired[1, columns])
        assert differs.tolist() == [changed % columns.sum()]


def test_chains_lie_where_the_file_has_them(folders: tuple[Path, Path]) -> None:
    """Catches coordinates of the first chain in all chains with its sequence."""
    chains = source(folders).parsed("1abc").assembly.chains
    apart = chains[1].positions[chains[1].mask > 0] - chains[0].positions[chains[0].mask > 0]
    np.testing.assert_allclose(apart, np.broadcast_to([40.0, 0, 0], apart.shape), atol=1e-3)


def test_a_sequence_without_alignments_is_named(folders: tuple[Path, Path]) -> None:
    """Catches a copy that needs alignments of its own, and a message that does not say of which chain."""
    for file in (folders[0] / "1abc_A").iterdir():
        file.unlink()
    (folders[0] / "1abc_A").rename(folders[0] / "gone")
    with pytest.raises(UserError, match="no alignments of 1abc_A, 1abc_B"):
        source(folders).parsed("1abc")
    with pytest.raises(UserError, match="2abc"):
        source(folders).parsed("2abc")
