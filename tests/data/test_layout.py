"""Names of chains, and of the files of an entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.data.sources.layout import StructureListing, entry_of, nested_structure, split_key, structure_file
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from tests.builders.mmcif import atom, entry


def test_split_key() -> None:
    """Catches entry names with underscores split at the first one, and clusters of UniClust30 refused."""
    assert split_key("6KWC_model_1_A") == ("6KWC_model_1", "A")
    assert split_key("A0A009IHW8") == ("A0A009IHW8", "")
    for bad in ("_A", "1abc_", ""):
        with pytest.raises(UserError, match="not a chain key"):
            split_key(bad)


@pytest.mark.parametrize(
    "name",
    ["1abc.cif", "1ABC.cif.gz", "1abc.mmcif", "1abc.pdb.gz", "pdb1abc.ent", "ab/1abc.cif.gz", "ab/pdb1abc.ent.gz",
     "1ABC.CIF", "1abc.PDB", "1ABC.CIF.GZ", "1ABC.MMCIF.gz", "PDB1ABC.ENT", "PDB1ABC.ENT.gz", "ab/1ABC.CIF"],
)  # fmt: skip
@pytest.mark.parametrize("wanted", ["1abc", "1ABC"])
def test_files_of_an_entry(tmp_path: Path, name: str, wanted: str) -> None:
    """Catches layouts of the PDB's mirrors that are not found, and names of another case."""
    assert structure_file(tmp_path, wanted) is None
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert structure_file(tmp_path, wanted) == path
    assert entry_of(path).lower() == "1abc"
    assert structure_file(tmp_path, "2abc") is None
    listing = StructureListing(tmp_path)
    assert listing.of_entry(wanted) == name
    assert (listing.has(f"{wanted}_A"), listing.has("2abc_A")) == (True, False)
    assert (listing.entries_without(["2abc_A"]), listing.entries_without(["1ABC_B"])) == (["1abc"], [])


@pytest.mark.parametrize("divided", ["", "bc/"])
def test_an_entry_has_the_file_of_its_own_name(tmp_path: Path, divided: str) -> None:
    """Catches one of two models taken for the other, whose name differs in upper and lower case only."""
    (tmp_path / "bc").mkdir()
    for name in ("abcd.cif", "ABCD.cif", "ABCD.CIF"):
        (tmp_path / f"{divided}{name}").touch()
    for wanted in ("abcd", "ABCD"):
        assert structure_file(tmp_path, wanted) == tmp_path / f"{divided}{wanted}.cif"
        assert StructureListing(tmp_path).of_entry(wanted) == f"{divided}{wanted}.cif"


def test_a_key_without_a_chain_means_the_only_one(tmp_path: Path) -> None:
    """Catches a predicted structure that is refused because its key names no chain, and one of several chains taken."""
    atoms = [atom("CA", "GLY", 1, 1.0), atom("CA", "GLY", 1, 2.0, label_asym_id="B", auth_asym_id="B")]
    (tmp_path / "A0A009.cif").write_text(entry({"A": "1:GLY"}, atoms[:1]))
    (tmp_path / "two.cif").write_text(entry({"A": "1:GLY", "B": "1:GLY"}, atoms))
    folder = StructureFolder(tmp_path)
    assert folder.has_structure("A0A009")
    assert folder.chain("A0A009").sequence == "G"
    with pytest.raises(UserError, match="Chains: A, B"):
        folder.chain("two")


@pytest.mark.parametrize("place", ["pdb/query.cif", "cif/cluster7.cif.gz", "cif/cluster7.mmcif"])
def test_a_structure_in_the_folder_of_its_chain(tmp_path: Path, place: str) -> None:
    """Catches OpenProteinSet's nested structures overlooked, and one of several taken at random."""
    path = tmp_path / "cluster7" / place
    path.parent.mkdir(parents=True)
    path.write_text(entry({"A": "1:ALA"}, [atom("CA", "ALA", 1, 0)]))
    (path.parent / ".hidden.cif").write_text("")
    folder = StructureFolder(tmp_path)
    assert folder.has_structure("cluster7")
    assert not folder.has_structure("cluster8")
    assert folder.chain("cluster7").sequence == "A"
    listing = StructureListing(tmp_path)
    assert (listing.has("cluster7"), listing.has("cluster8")) == (True, False)
    assert (listing.entries_without(["cluster8"]), listing.entries_without(["cluster7"])) == (["cluster7"], [])
    (path.parent / "other.pdb").write_text("")
    with pytest.raises(UserError, match=r"cluster7: several structures of the chain \(.*\); keep one"):
        nested_structure(tmp_path, "cluster7")
