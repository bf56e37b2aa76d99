"""The index of complexes: what it says of each entry, runs that read it, and files that it contradicts."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gemmi
import numpy as np
import pytest

from evodsp.cli import main
from evodsp.config import FilterConfig
from evodsp.data.build import build
from evodsp.data.complexes.merging import merge
from evodsp.data.complexes.pairing import BY_ENTRY, BY_SPECIES, PairingRule, say_query_paired
from evodsp.data.config import BuildConfig
from evodsp.data.index.data_index import DataIndex
from evodsp.data.records import COMPLEXES
from evodsp.data.sources import chain_files
from evodsp.data.sources.opening import ComplexFiles
from evodsp.errors import UserError
from evodsp.training.chains import find_chains
from evodsp.training.config import DataConfig
from tests.builders.alignments import archives, archives_in_folders, in_folders, one_database
from tests.builders.bundled import dimers
from tests.builders.records import same

Folders = tuple[Path, Path]


def index_of(folders: Folders, *options: str) -> DataIndex:
    output = folders[0].parent / "index"
    where = [f"--alignment_dir={folders[0]}", f"--structure_dir={folders[1]}", f"--output={output}"]
    assert main(["data", "index", "--complexes=true", "--workers=0", "--overwrite=true", *where, *options]) == 0
    return DataIndex(output, COMPLEXES)


def another(folders: Folders, entry: str, *chains: str) -> Path:
    """Another entry with the structure of 1abc, and alignments of these of its chains; returns its structure."""
    for chain in chains:
        shutil.copytree(folders[0] / f"1abc_{chain}", folders[0] / f"{entry}_{chain}")
    text = (folders[1] / "1abc.cif").read_text()
    (folders[1] / f"{entry}.cif").write_text(text)
    return folders[1] / f"{entry}.cif"


def test_what_it_says_of_each_entry(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a row without copies, residues of one chain for all, entries that are read in part, and a reason that is lost."""
    another(folders, "2abc", "A")
    cut = another(folders, "3abc", "A", "C")
    cut.write_text(cut.read_text()[:4000])
    another(folders, "4abc", "A", "C").write_text("data_4ABC\n")
    clusters = folders[0].parent / "clusters.txt"
    clusters.write_text("1abc_A 8abc_A 9abc_A\n1abc_C 9abc_C\n")
    index = index_of(folders, f"--cluster_file={clusters}")
    first = index.chains(index.row("1abc"))
    assert (first.names, first.owners) == (("A", "B", "C"), ("1abc_A", "1abc_A", "1abc_C"))
    assert list(first.entities.values()) == [2, 1]
    assert index.table.lengths[0] == sum(map(len, first.sequences)) > 100
    assert index.table.cluster_sizes.tolist() == [2, -1, -1, -1], "the smallest of its chains"
    problems = dict(zip(index.keys, index.content.problems, strict=True))
    assert (problems["1abc"], problems["2abc"]) == ("", "no alignments of 2abc_C")
    assert all(f"{entry}.cif:" in problems[entry] for entry in ("3abc", "4abc"))
    assert ComplexFiles(*folders, index=index).keys() == ["1abc", "3abc", "4abc"]
    assert (
        "4 complexes, 3 with alignments and structure, 1 without alignments, 3 with a problem"
        in capsys.readouterr().err
    )


def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are listed from now on."""
    listed: list[str] = []
    for name in ("scandir", "listdir"):
        function = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, function=function: listed.append(os.path.basename(path)) or function(path)
        )
    return listed


@pytest.mark.parametrize(
    ("pack", "rule"),
    [
        *((in_folders, BY_SPECIES), (in_folders, BY_ENTRY), (archives, BY_ENTRY)),
        *((archives_in_folders, BY_SPECIES), (one_database, BY_ENTRY)),
    ],
)
def test_a_complex_is_the_same_with_an_index_which_lists_its_files(
    folders: Folders,
    rule: PairingRule,
    pack: Callable[[Path, dict[str, list[Path]]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches alignments, rows for pairing or template hits of another chain or in another order, hits of UniProt that a
    layout hides, an index that a worker does not get, and folders and indices of databases that each sample reads again."""
    letters = ComplexFiles(*folders).parsed("1abc").assembly.chains[2].sequence
    hit = f"# STOCKHOLM 1.0\n3abc_C/1-{len(letters) - 7}  {'-' * 7}{letters[7:]}\n//\n"
    (folders[0] / "1abc_C" / "hmm_output.sto").write_text(hit)
    packed = folders[0].with_name("packed"), folders[1]
    pack(packed[0], {folder.name: sorted(folder.iterdir()) for folder in folders[0].iterdir()})
    of_files = ComplexFiles(*folders, rule=rule).parsed("1abc")
    plain = ComplexFiles(*packed, rule=rule).parsed("1abc", with_hits=True)
    indexed = pickle.loads(pickle.dumps(ComplexFiles(*packed, rule=rule, index=index_of(packed))))
    listed = listings(monkeypatch)
    monkeypatch.setattr(chain_files, "read_databases", lambda _: 1 / 0)
    found = indexed.parsed("1abc", with_hits=True)
    assert listed == []
    assert found.assembly.names == plain.assembly.names
    expected = {} if pack in (archives, archives_in_folders) else {letters: ["3abc_C"]}
    for one in (plain, found):
        assert {query: [hit.key for hit in hits] for query, hits in one.hits.items() if hits} == expected
    for *others, one in zip(plain.chains, found.chains, of_files.chains, strict=True):
        for other in others:
            same(other, one)
            assert other.pairing is not None


def test_identical_chains_lend_their_alignments(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an entry of OpenProteinSet that is left out because its alignments lie with another one; and a
    chain that is given its duplicate's alignments in place of its own, or of those of its copy in the entry."""
    another(folders, "2abc")
    another(folders, "3abc", "A")
    lists = folders[0].parent / "duplicates.txt"
    lists.write_text("1abc_A 2abc_B 3abc_A\n1abc_A 3abc_B\n1abc_C 2abc_C 3abc_C\n")
    index = index_of(folders, f"--duplicates={lists}")
    assert "2 with alignments of an identical chain; 9 chains" in capsys.readouterr().err
    owners = {entry: index.chains(index.row(entry)).owners for entry in ("1abc", "2abc", "3abc")}
    assert owners["1abc"] == owners["2abc"] == ("1abc_A", "1abc_A", "1abc_C")
    assert owners["3abc"] == ("3abc_A", "3abc_A", "1abc_C")
    lent = ComplexFiles(*folders, index=index).parsed("2abc")
    assert [len(chain.msa.msa) for chain in lent.chains] == [3, 3, 3]


def test_caches_go_before_the_structures_of_complexes(folders: Folders) -> None:
    """Catches caches that an index of complexes ignores, and sequences of a cache in place of those of the structure."""
    chains, entries = (folders[0].parent / name for name in ("chains.json", "entries.json"))
    chains.write_text(json.dumps({"1abc_A": {"seq": "ACX", "cluster_size": 4}, "1abc_C": {"cluster_size": 3}}))
    entry = {"chain_ids": ["A"], "seqs": ["GG"], "release_date": "1970-01-11", "resolution": 7.5}
    entries.write_text(json.dumps({"1abc": entry}))
    of_structures = index_of(folders).chains(0)
    index = index_of(folders, f"--chain_data_cache={chains}", f"--mmcif_cache={entries}")
    assert index.chains(0) == of_structures
    assert index.table.release_days.tolist() == [10]
    assert index.table.resolutions.tolist() == [7.5]
    assert index.table.cluster_sizes.tolist() == [3]
    assert index.frequencies().tolist() == [1 / 4 + 1 / 2 + 1 / 3]


def test_an_index_finds_the_names_that_folders_do(folders: Folders) -> None:
    """Catches an entry whose file has another name than its chains' folders, a chain whose alignments have the name of its
    entry, and one whose structure lies in a folder of its name, that only chains, only folders or only an index have."""
    structure = gemmi.read_structure(str(folders[1] / "1abc.cif"))
    (folders[1] / "1abc.cif").rename(folders[1] / "1ABC.cif")
    for name in "BC":
        structure[0].remove_chain(name)
    structure.make_mmcif_document().write_file(str(folders[1] / "alone.cif"))
    nested = folders[1] / "1abc-2"  # its chain stands before those of 1abc
    (nested / "cif").mkdir(parents=True)
    shutil.copy(folders[1] / "alone.cif", nested / "cif" / "model.cif")
    for key in ("alone", "1abc-2_A"):
        shutil.copytree(folders[0] / "1abc_A", folders[0] / key)
    index = index_of(folders)
    owners = [("1abc_A", "1abc_A", "1abc_C"), ("1abc-2_A",), ("alone",)]
    assert [index.chains(row).owners for row in range(3)] == owners
    for one in (None, index):
        files = ComplexFiles(*folders, index=one)
        assert files.keys() == ["1abc", "1abc-2", "alone"]
        assert all(map(files.structure_lookup(), files.keys()))
        assert [len(files.parsed(key).chains[0].msa.msa) for key in files.keys()] == [3, 3, 3]  # noqa: SIM118


def test_an_entry_that_was_broken_when_it_was_scanned(folders: Folders) -> None:
    """Catches an entry whose chains the index does not know and whose alignments are not looked for, as its own, either."""
    path, text = folders[1] / "1abc.cif", (folders[1] / "1abc.cif").read_text()
    path.write_text(text[:4000])
    index = index_of(folders)
    assert index.chains(0).owners == ()
    path.write_text(text)
    assert [len(chain.msa.msa) for chain in ComplexFiles(*folders, index=index).parsed("1abc").chains] == [3, 3, 3]


def test_files_that_the_index_contradicts(folders: Folders) -> None:
    """Catches a run on a structure that was replaced since the index was made."""
    index = index_of(folders)
    path = folders[1] / "1abc.cif"
    path.write_text(path.read_text().replace(" B ", " D "))
    message = (
        rf"1abc\.cif: chain .* is .*, but in {index.path} it is .*make it again: evodsp data index --complexes true"
    )
    with pytest.raises(UserError, match=message):
        ComplexFiles(*folders, index=index).parsed("1abc")
    assert index.stale_sources() == []
    another(folders, "2abc")
    assert index.stale_sources() == [f"structure_dir {folders[1]}"]


def test_an_index_of_something_else(folders: Folders) -> None:
    """Catches a run whose index lists other assemblies, or chains."""
    index = index_of(folders, "--assembly=null")
    assert index.command.startswith("evodsp data index --complexes true --assembly null --alignment_dir")
    with pytest.raises(UserError, match=r"an index of the asymmetric unit \(null\), but data.assembly is assembly 1"):
        ComplexFiles(*folders, index=index)
    store = folders[0].parent / "store"
    build(BuildConfig(*folders, store, complexes=True, workers=1))
    config = DataConfig(store=str(store), index=str(index.path), train_chains=["1abc"])
    with pytest.raises(UserError, match=r"an index of the asymmetric unit \(null\), but data.assembly is assembly 1"):
        find_chains(config, arrangement="multimer")
    with pytest.raises(UserError, match="not an index of chains, but of complexes; make it again"):
        DataIndex(index.path)
    of_chains = folders[0].parent / "store_of_chains"
    build(BuildConfig(*folders, of_chains, workers=1))
    config = DataConfig(store=str(of_chains), index=str(index.path), train_chains=["1abc_A"], sampling="alphafold2")
    with pytest.raises(UserError, match="not an index of chains, but of complexes; make it again"):
        find_chains(config)
    chains = folders[0].parent / "chains"
    where = [f"--alignment_dir={folders[0]}", f"--structure_dir={folders[1]}", f"--output={chains}"]
    assert main(["data", "index", "--workers=0", *where]) == 0
    with pytest.raises(
        UserError, match="not an index of complexes, but of chains; make it again with 'evodsp data index --complexes"
    ):
        DataIndex(chains, COMPLEXES)
    assert main(["data", "index", "--assembly=2", *where, "--overwrite=true"]) == 2


def test_a_run_filters_and_draws_by_the_index(tmp_path: Path) -> None:
    """Catches filters and weights that know nothing of complexes, and notes that do not know that an index is old."""
    folders = tmp_path / "alignments", tmp_path / "mmcif_files"
    for entry in ("c001", "c002", "c003"):
        for chain in "AB":
            shutil.copytree(dimers() / "alignments" / f"{entry}_{chain}", folders[0] / f"{entry}_{chain}")
    shutil.copytree(dimers() / "mmcif_files", folders[1])
    clusters = tmp_path / "clusters.txt"
    clusters.write_text("c001_A 9abc_A 8abc_A 7abc_A\nc002_A 9abc_B\nc003_A\n")
    index = index_of(folders, f"--cluster_file={clusters}")
    data = DataConfig(
        alignment_dir=str(folders[0]),
        structure_dir=str(folders[1]),
        index=str(index.path),
        sampling="alphafold2",
        filters=FilterConfig(max_release_date="2020-01-15"),
    )
    found = find_chains(data, arrangement="multimer")
    assert found.train == ["c001", "c002"]
    assert found.weights is not None
    # Chains of 4 and an unknown cluster, of 2 and an unknown one; both chains of an entry are of one sequence, or of their own.
    unknown = 1 / sum(
        letters == index.chains(0).sequences[1] for row in range(3) for letters in index.chains(row).sequences
    )
    assert found.weights.tolist() == [1 / 4 + unknown, 1 / 2 + unknown]
    assert found.notes(Path("x")) == []
    (folders[0] / "4abc_A").mkdir()
    assert [note.partition(";")[0] for note in found.notes(Path("x"))] == [
        f"{index.path} is older than alignment_dir {folders[0]}"
    ]
    store = str(tmp_path / "store")
    options = ["--alignment_dir", str(folders[0]), "--structure_dir", str(folders[1]), "--output", store, "--workers=1"]
    shutil.rmtree(folders[0] / "4abc_A")
    assert main(["data", "build", *options, "--complexes", "true"]) == 0
    for source in ({}, {"index": None}, {"index": None, "store": store}):
        uniform = replace(data, sampling="uniform", **source)  # type: ignore[arg-type]
        assert find_chains(uniform, arrangement="multimer").train == ["c001", "c002"], source
    with pytest.raises(UserError, match=r"index of assembly 1, but data\.assembly is the asymmetric unit"):
        find_chains(replace(data, assembly=None), arrangement="multimer")


# Complexes read from files: the chains of an assembly, their alignments, and those that are paired.


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


@pytest.fixture
def nothing_said() -> None:
    """Warnings as in a new process."""
    say_query_paired.cache_clear()


def test_warnings_of_a_large_set_end(caplog: pytest.LogCaptureFixture, nothing_said: None) -> None:
    """Catches a log flooded by thousands of chains without rows for pairing, and one that ends without a word."""
    for number in [*range(30), 3]:
        say_query_paired(f"alignments/{number}", "names")
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == [f"alignments/{number}" for number in range(11)]
    assert ["doctor" in line for line in said] == [False] * 10 + [True]


@pytest.mark.parametrize("named", [False, True])
def test_a_chain_without_rows_for_pairing_is_said(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, nothing_said: None, named: bool
) -> None:
    """Catches a complex whose rows are not paired without a word, because a search was forgotten or their names are not
    UniProt's."""
    hits = folders[0] / "1abc_C" / "uniprot_hits.a3m"
    hits.write_text(hits.read_text().replace("|", ".")) if named else hits.unlink()
    parsed = source(folders).parsed("1abc")
    assert parsed.chains[0].pairing is not None
    assert parsed.chains[2].pairing is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{folders[0] / '1abc_C'}: no rows to pair")
    assert "with names such as tr|" in said
