"""The comparison of readers of structure files."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.data.formats import mmcif
from scripts.benchmarks import structure_readers
from tests.builders.backbone import chain, ligand, pdb_text

NAMES = ("GLY", "SER", "HIS", "LYS")


def test_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a residue or an atom that is lost in silence and counts as an agreement."""
    path = tmp_path / "a.pdb"
    path.write_text(pdb_text(chain(NAMES)))
    assert structure_readers.compare(path) == ("agree", 1, "")
    read = mmcif._Entry.chain

    def lossy(entry: mmcif._Entry, name: str) -> mmcif.Chain:
        found = read(entry, name)
        found.mask[2] = 0
        return found

    monkeypatch.setattr(mmcif._Entry, "chain", lossy)
    assert structure_readers.compare(path)[0] == "silent"
    monkeypatch.undo()
    path.write_text(pdb_text([*chain(NAMES), ligand("GLY", 9)]))
    assert structure_readers.compare(path)[0] == "differ with a line"
    path.write_text(pdb_text([ligand("HOH", 9, atoms=(("O", 0, 0),))]))
    assert structure_readers.compare(path)[0] == "no amino acids"
