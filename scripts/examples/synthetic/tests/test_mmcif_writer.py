"""Written mmCIF is read back unchanged, by evodsp and by gemmi."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import gemmi
import numpy as np
import pytest

from evodsp.data.formats.mmcif import read_assembly, read_chain
from evodsp.data.records import Chain
from evodsp.errors import UserError
from evodsp.geometry.residues import RESTYPE_ATOM37_MASK, RESTYPE_ORDER
from scripts.examples.synthetic.mmcif_writer import assembly_tables, write_mmcif


def _chain(chain_id: str = "A", sequence: str = "ACDGWX", **changes: object) -> Chain:
    length = len(sequence)
    random = np.random.default_rng(0)
    mask = RESTYPE_ATOM37_MASK[[RESTYPE_ORDER[letter] for letter in sequence]].copy()
    missing = np.zeros(length, dtype=bool)
    missing[0] = True
    mask[0], mask[3, 4], mask[-1, 1] = 0, 0, 1  # a missing residue, a missing atom, an unknown residue's CA
    numbers = np.array([0, 11, 12, 12, 13, 14][:length], dtype=np.int32)
    values: dict[str, object] = {
        "pdb_id": "t001",
        "chain_id": chain_id,
        "sequence": sequence,
        "residue_number": numbers,
        "insertion_code": ("", "", "", "A", "", "")[:length],
        "is_missing": missing,
        "positions": (random.normal(size=(length, 37, 3)) * 20 * mask[..., None]).astype(np.float32),
        "mask": mask,
        "resolution": 1.85,
        "method": "x-ray diffraction",
        "release_date": date(2021, 3, 4),
    }
    return Chain(**(values | changes))  # type: ignore[arg-type]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Catches missing residues, insertion codes, author numbers, X, masks or metadata lost on the way."""
    chain = _chain()
    write_mmcif(tmp_path / "t001.cif", [chain])
    read = read_chain(tmp_path / "t001.cif", "A")
    assert (read.sequence, read.insertion_code) == (chain.sequence, chain.insertion_code)
    assert (read.resolution, read.method.lower(), read.release_date) == (1.85, chain.method, chain.release_date)
    np.testing.assert_array_equal(read.residue_number, chain.residue_number)
    np.testing.assert_array_equal(read.is_missing, chain.is_missing)
    np.testing.assert_array_equal(read.mask, chain.mask)
    assert np.abs(read.positions - chain.positions).max() < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["t001.cif"]


def test_chains_with_odd_names_and_shared_sequences(tmp_path: Path) -> None:
    """Author chain ids that need quoting; two chains of one sequence must be one entity."""
    chains = [_chain("it's"), _chain("B"), _chain("7", "GGACD")]
    write_mmcif(tmp_path / "t001.cif", chains)
    for chain in chains:
        assert read_chain(tmp_path / "t001.cif", chain.chain_id).sequence == chain.sequence
    block = gemmi.cif.read(str(tmp_path / "t001.cif"))[0]
    assert list(block.find_values("_entity.id")) == ["1", "2"]
    assert list(block.find_values("_struct_asym.entity_id")) == ["1", "1", "2"]


def test_an_assembly_has_all_chains_where_they_are(tmp_path: Path) -> None:
    """Catches a chain that is left out of the assembly, and an operator that moves it."""
    chains = [_chain("A"), _chain("x", "GGACDW")]
    write_mmcif(tmp_path / "t001.cif", chains, tables=assembly_tables(chains))
    read = read_assembly(tmp_path / "t001.cif", "1")
    assert read.names == ("A", "x")
    for chain, written in zip(read.chains, chains, strict=True):
        assert np.abs(chain.positions - written.positions).max() < 1e-3
    with pytest.raises(UserError, match="its assemblies are 1"):
        read_assembly(tmp_path / "t001.cif", "2")


def test_mistakes_leave_no_file(tmp_path: Path) -> None:
    """Catches a file of NaNs, or half a file, being written."""
    with pytest.raises(UserError, match="residue 2 has a coordinate"):
        write_mmcif(tmp_path / "t001.cif", [_chain(positions=np.full((6, 37, 3), np.nan, np.float32))])
    assert not list(tmp_path.iterdir())
