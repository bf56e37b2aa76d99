"""Names of chains, and of the files of an entry."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.data.index.data_index import DataIndex
from evodsp.data.samples.selection import Presence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.layout import (
    StructureListing,
    chain_folders,
    entry_of,
    nested_structure,
    split_key,
    structure_file,
)
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import FileFormatError, UserError
from evodsp.training.chains import find_chains
from evodsp.training.config import DataConfig
from tests.builders.mmcif import atom, entry
from tests.builders.training_chains import SEQUENCES, write_chain


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


# Structure folders: the file of an entry, and the source of its release date.


@pytest.mark.parametrize("place", ["structures", ".", "data_caches"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("mmcif_cache.json", {"1abc": {"release_date": "2001-02-03", "chain_ids": ["A"]}, "2abc": {}}),
        ("chain_data_cache.json", {"1abc_A": {"release_date": "2001-02-03"}, "1abc_B": {"release_date": "2001-02-03"}}),
    ],
)
def test_release_dates_of_caches(tmp_path: Path, name: str, cache: dict, place: str) -> None:
    """Catches a cache that is ignored (every file would be read for its date), and chain keys split wrongly."""
    structures = tmp_path / "structures"
    structures.mkdir()
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / name).write_text(json.dumps(cache))
    folder = StructureFolder(structures)
    assert folder.release_date("1abc") == date(2001, 2, 3)
    assert folder.release_date("2abc") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"1abc": {"release_date": "soon"}}', "the release_date of '1abc' is 'soon', not a date"),
        ("[1]", "expected"),
        ("{", "not JSON"),
    ],
)
def test_broken_caches_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mmcif_cache.json").write_text(text)
    with pytest.raises(FileFormatError, match=message) as caught:
        StructureFolder(tmp_path).release_date("1abc")
    assert "\n" not in str(caught.value)


# ColabFold's flat folder of alignments, and names of records and of chains that meet.


KEY, OTHER = SEQUENCES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two chains, with ColabFold's alignments: NAME.a3m, whose first line is that of one chain, and a server's answer."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
        (file,) = (tmp_path / "alignments" / key).iterdir()
        text = f"#{len(letters)}\t1\n{file.read_text()}"
        file.rename(tmp_path / "alignments" / f"{key}.a3m").write_text(text)
        (tmp_path / "alignments" / key).rmdir()
    (tmp_path / "alignments" / f"{KEY}_env").mkdir()
    (tmp_path / "alignments" / f"{KEY}_env" / "uniref.a3m").write_text(">q\nA\n")
    (tmp_path / "alignments" / "log.txt").write_text("")
    return tmp_path


def roots(folder: Path) -> list[str]:
    return ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]


def index_of(folder: Path) -> DataIndex:
    assert main(["data", "index", *roots(folder), "--output", str(folder / "index"), "--workers=0"]) == 0
    return DataIndex(folder / "index")


def rows(store: ChainFiles | FeatureStore, key: str) -> list[list[int]]:
    return store.parsed(key, with_hits=False).chains[0].msa.msa.tolist()


def test_training_takes_a_flat_folder(folder: Path) -> None:
    """Catches flat files that training, the index, the doctor or the store misses, or whose rows differ from those of the
    same file in a folder; and ColabFold's folder of a server's answer taken for a chain."""
    files = ChainFiles(folder / "alignments", folder / "mmcif_files")
    assert files.keys() == chain_folders(folder / "alignments") == sorted(SEQUENCES)
    found = find_chains(DataConfig(str(folder / "alignments"), str(folder / "mmcif_files")))
    assert (found.train, found.missing) == (sorted(SEQUENCES), {})
    indexed = ChainFiles(folder / "alignments", folder / "mmcif_files", index_of(folder))
    assert indexed.index is not None
    assert ["".join(indexed.index.sequences_of(row)) for row in range(2)] == list(SEQUENCES.values())
    listed = indexed.index.alignments_of(KEY)
    assert listed is not None
    assert [file.name for file in listed.files] == [".a3m"]
    assert not indexed.index.differs(KEY, indexed.alignment_dir)
    assert main(["data", "doctor", *roots(folder), "--output", str(folder / "doctor"), "--workers=0"]) == 0
    assert main(["data", "build", *roots(folder), "--output", str(folder / "store"), "--workers=1"]) == 0
    flat = rows(files, KEY)
    assert flat == rows(indexed, KEY) == rows(FeatureStore(str(folder / "store")), KEY)
    (folder / "alignments" / KEY).mkdir()
    (folder / "alignments" / f"{KEY}.a3m").rename(folder / "alignments" / KEY / "hits.a3m")
    assert rows(files, KEY) == flat
    assert files.keys() == sorted([*SEQUENCES, f"{KEY}_env"]), "without the file it may be anything"


@pytest.mark.parametrize("with_index", [False, True], ids=["folders", "index"])
def test_a_chain_has_the_alignments_of_its_entry(folder: Path, with_index: bool) -> None:
    """Catches 1abc.a3m that is not found for the chain 1abc_A, that is given to another chain id, or to one of two chains."""
    for key in SEQUENCES:
        (folder / "alignments" / f"{key}.a3m").rename(folder / "alignments" / f"{key.partition('_')[0]}.a3m")
    entry_name, _, chain_id = OTHER.partition("_")
    path = folder / "mmcif_files" / f"{entry_name}.cif"
    atoms = [atom("CA", "ALA", 1, x, label_asym_id=name, auth_asym_id=name) for x, name in ((1, "A"), (2, chain_id))]
    path.write_text(entry({"A": "1:ALA", chain_id: "1:ALA"}, atoms))
    store = ChainFiles(folder / "alignments", folder / "mmcif_files", index_of(folder) if with_index else None)
    presence = Presence(store)
    assert presence.lacks(KEY) is None
    assert presence.lacks("1abc_Z") == presence.lacks(OTHER) == "alignments"
    assert store.has_alignments(KEY)
    assert len(rows(store, KEY)) > 1
    assert store.chain(KEY).sequence == SEQUENCES[KEY]
    assert store.template_hits(KEY, store.query(KEY)) == []
    with pytest.raises(UserError, match=r"no (alignments of )?chain '1abc_Z'"):
        store.alignments("1abc_Z", store.query(KEY))


def test_filters_and_sampling_find_the_row_of_its_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 1abc_A that an index with the row 1abc does not know: left out by filters and sampling, without a resolution, or
    missing in the doctor's facts; and the row given to another chain id."""
    for key in SEQUENCES:
        (folder / "alignments" / f"{key}.a3m").rename(folder / "alignments" / f"{key.partition('_')[0]}.a3m")
    index = index_of(folder)
    assert index.keys[:] == ["1abc", "1abc_A_env", "2abc"]
    where = {"alignment_dir": str(folder / "alignments"), "structure_dir": str(folder / "mmcif_files")}
    data = DataConfig(**where, index=str(index.path), train_chains=[OTHER, KEY], sampling="alphafold2")
    monkeypatch.setattr("evodsp.training.chains.MOST_CHAINS_READ", 0)  # resolutions are then those of the index
    found = find_chains(data)
    assert (found.train, found.missing, found.resolutions.tolist()) == ([OTHER, KEY], {}, [2, 2])
    assert found.weights is not None
    assert found.weights.tolist() == index.frequencies()[[2, 0]].tolist()
    store = ChainFiles(folder / "alignments", folder / "mmcif_files", index)
    assert index.table.rows_of([OTHER, "1abc_Z", KEY, "1abc", "3abc_A"], store.name_of) == [2, None, 0, 0, None]
    (folder / "list.txt").write_text(f"{KEY}\n{OTHER}\n")
    options = [*roots(folder), "--index", str(index.path), "--chains", str(folder / "list.txt"), "--workers=0"]
    assert main(["data", "doctor", *options, "--output", str(folder / "doctor")]) == 0
    facts = json.loads((folder / "doctor" / "doctor.json").read_text())["filters"]
    assert facts["unknown release date"] == 2, "facts that the index has of both"


@pytest.mark.parametrize("with_index", [False, True], ids=["folders", "index"])
def test_a_structure_of_the_whole_name(folder: Path, with_index: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Catches my_protein.cif that is not found for the record my_protein, one that counts as without alignments, and a choice
    between two files that nobody is told of."""
    (folder / "alignments" / f"{KEY}.a3m").rename(folder / "alignments" / "my_protein.a3m")
    (folder / "mmcif_files" / "1abc.cif").rename(folder / "mmcif_files" / "my_protein.cif")
    store = ChainFiles(folder / "alignments", folder / "mmcif_files", index_of(folder) if with_index else None)
    assert Presence(store).lacks("my_protein") is None
    assert store.chain("my_protein").sequence == SEQUENCES[KEY]
    assert len(rows(store, "my_protein")) > 1
    listing = StructureListing(folder / "mmcif_files")
    assert listing.entries_without(store.keys()) == []
    assert not caplog.messages
    (folder / "mmcif_files" / "my.cif").touch()
    assert StructureListing(folder / "mmcif_files").of_chain("my_protein") == "my.cif"
    (said,) = caplog.messages
    assert "my.cif and my_protein.cif may both be the structure of 'my_protein'" in said
