"""The index of a data set: what a scan finds, what is mapped, what is refused, and scans that are killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evodsp.cli import main
from evodsp.data.index import scan
from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.metadata import UNKNOWN_CLUSTER, UNKNOWN_DAY
from evodsp.data.index.scan import keep_parts
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.errors import UserError
from evodsp.files import lock
from tests.builders.alignments import database
from tests.builders.training_chains import SEQUENCES, write_chain

KEY, OTHER = SEQUENCES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """alignments/ and mmcif_files/ with two chains."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    return tmp_path


def words(folder: Path, *options: str, output: str = "index") -> list[str]:
    roots = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    return ["data", "index", *roots, "--output", str(folder / output), "--workers", "0", *options]


def index_of(folder: Path, *options: str) -> DataIndex:
    assert main(words(folder, *options)) == 0
    return DataIndex(folder / "index")


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the two chains."""
    folder = tmp_path_factory.mktemp("indexed")
    for key, letters in SEQUENCES.items():
        write_chain(folder, key, letters)
    return index_of(folder).path


@pytest.fixture
def path(indexed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(indexed, tmp_path / "index")


def store_of(folder: Path, index: DataIndex | None = None) -> ChainFiles:
    return ChainFiles(folder / "alignments", folder / "mmcif_files", index)


def content(index: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(index.iterdir())}


def test_headers_alignments_and_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a column that is shifted, files of another chain, an unresolved chain that passes for usable, and a
    comment taken for the first record."""
    third = folder / "alignments" / "3abc_C"
    third.mkdir()
    (third / "hits.a3m").write_text("#4\t1\n>q\nAAAX\n>r\nAAAA\n")
    index = index_of(folder)
    table = index.table
    assert index.keys[:] == [KEY, OTHER, "3abc_C"]
    assert table.lengths.tolist() == [13, 13, 4]
    assert ["".join(index.sequences_of(row)) for row in range(3)] == [*SEQUENCES.values(), "AAAX"]
    assert table.resolutions.tolist()[:2] == [2.0, 2.0]
    assert math.isnan(table.resolutions[2])
    assert set(table.release_days.tolist()) == {UNKNOWN_DAY}
    assert set(table.cluster_sizes.tolist()) == {UNKNOWN_CLUSTER}
    assert table.largest_fractions.tolist() == pytest.approx([2 / 13, 1 / 13, 0.75])
    assert table.unknown_fractions.tolist() == pytest.approx([0, 0, 0.25])
    assert [index.structure(row) for row in range(3)] == ["1abc.cif", "2abc.cif", None]
    listed = index.alignments_of(OTHER)
    assert listed is not None
    assert (listed.owner, listed.database) == (OTHER, "")
    assert [(file.name, file.length) for file in listed.files] == [
        ("uniref90_hits.a3m", (folder / "alignments" / OTHER / "uniref90_hits.a3m").stat().st_size)
    ]
    assert "3 chains, 2 with alignments and structure, 1 without a structure" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [False, True], ids=["folders", "database"])
def test_rows_for_pairing_of_an_identical_chain(folder: Path, packed: bool) -> None:
    """Catches rows for pairing that an index hides, because it does not list them, or that an identical chain does not lend."""
    text = f">q\n{SEQUENCES[KEY]}\n>sp|P12345|X_BOVIN\n{SEQUENCES[KEY]}\n"
    (folder / "alignments" / KEY / "uniprot_hits.a3m").write_text(text)
    (folder / "duplicates").write_text(f"5abc_A {KEY}\n")
    if packed:
        folders = {key: list((folder / "alignments" / key).iterdir()) for key in SEQUENCES}
        files = {key: {path.name: path.read_text() for path in paths} for key, paths in folders.items()}
        shutil.rmtree(folder / "alignments")
        (folder / "alignments").mkdir()
        database(folder / "alignments", files)
    index = index_of(folder, f"--duplicates={folder / 'duplicates'}")
    alone, indexed = (ChainFiles(folder / "alignments", None, one) for one in (None, index))
    for source, key in ((alone, KEY), (indexed, KEY), (indexed, "5abc_A")):
        assert source.has_alignments(key)
        (found,) = source.alignments_for_pairing(key, ProteinSequence(key, SEQUENCES[KEY]))
        assert tuple(found.names) == ("q", "sp|P12345|X_BOVIN")
        assert source.alignments_for_pairing(OTHER, ProteinSequence(OTHER, SEQUENCES[OTHER])) == []
    assert not alone.has_alignments("5abc_A")
    assert not indexed.has_alignments("9abc_A")


def test_caches_go_before_headers(folder: Path) -> None:
    """Catches caches that are ignored or mixed up, and clusters of the cluster file overridden by the cache's."""
    facts = {"release_date": "1970-01-11", "seq": "ACX", "resolution": 9.5, "cluster_size": 4}
    (folder / "chains.json").write_text(json.dumps({KEY: facts, "8abc_A": {"seq": "AC"}}))
    entry = {"chain_ids": ["B"], "seqs": ["GG"], "release_date": "1970-01-03", "resolution": 0.0}
    (folder / "entries.json").write_text(json.dumps({"2abc": entry, "9abc": entry}))
    (folder / "clusters").write_text("2ABC_B x_1\n")
    options = {"chain_data_cache": "chains.json", "mmcif_cache": "entries.json", "cluster_file": "clusters"}
    index = index_of(folder, *(f"--{option}={folder / name}" for option, name in options.items()))
    assert index.keys[:] == [KEY, OTHER, "8abc_A"]  # mmcif_cache lists entries that are no part of the data set
    assert ["".join(index.sequences_of(row)) for row in range(3)] == ["ACX", "GG", "AC"]
    assert index.table.release_days.tolist() == [10, 2, UNKNOWN_DAY]
    assert index.table.resolutions.tolist()[:2] == [9.5, 0.0]
    assert index.table.cluster_sizes.tolist() == [4, 2, UNKNOWN_CLUSTER]
    assert index.has_alignments().tolist() == [True, True, False]


def test_clusters_of_entities_find_their_chains(folder: Path) -> None:
    """Catches an entity taken for a chain of that name, copies that count once, and cached chains without a cluster."""
    path = folder / "mmcif_files" / "2abc.cif"
    text = path.read_text()
    assert text.count("_entity_poly.pdbx_strand_id") == 1
    chains = ["2abc_B", "2abc_1", "1abc_A"]
    path.write_text(re.sub(r"(_entity_poly.pdbx_strand_id\s+)B", r"\g<1>B,1", text))
    shutil.copytree(folder / "alignments" / OTHER, folder / "alignments" / "2abc_1")
    (folder / "clusters").write_text("2ABC_1 AF_AFP12345F1_1\n1ABC_2 1ABC_1 7ABC_1\n")
    (folder / "cache.json").write_text(json.dumps({OTHER: {"seq": "ACX", "cluster_size": 9}}))
    index = index_of(folder, f"--cluster_file={folder / 'clusters'}", f"--chain_data_cache={folder / 'cache.json'}")
    sizes = dict(zip(index.keys, index.table.cluster_sizes.tolist(), strict=True))
    assert [sizes[key] for key in chains] == [2, 2, 1]
    assert "".join(index.sequences_of(index.row(OTHER))) == "ACX"


def test_identical_chains_lend_their_alignments(folder: Path) -> None:
    """Catches a duplicate without alignments, one whose own alignments are ignored, and a structure that is borrowed too."""
    shutil.copy(folder / "mmcif_files" / "1abc.cif", folder / "mmcif_files" / "5abc.cif")
    (folder / "duplicates").write_text(f"5abc_A {KEY} 7abc_A\n{OTHER} 6abc_A\n")
    index = index_of(folder, f"--duplicates={folder / 'duplicates'}")
    assert index.keys[:] == [KEY, OTHER, "5abc_A", "6abc_A", "7abc_A"]
    assert index.table.representatives.tolist() == [0, 1, 0, 1, 0]
    store = store_of(folder, index)
    assert store.keys() == index.keys[:]
    assert [store.has_structure(key) for key in store.keys()] == [True, True, True, False, False]  # noqa: SIM118
    (borrowed,) = store.alignments("5abc_A")
    assert borrowed.source == str(folder / "alignments" / KEY / "uniref90_hits.a3m")
    assert store.chain("5abc_A").sequence == SEQUENCES[KEY]


def test_a_chain_with_alignments_borrows_none(folder: Path) -> None:
    """Catches a chain that is given its duplicate's alignments in place of its own: the first of the set, or the last."""
    shutil.copytree(folder / "alignments" / KEY, folder / "alignments" / "5abc_A")
    for order in ((KEY, "5abc_A", "7abc_A"), ("7abc_A", "5abc_A", KEY)):
        (folder / "duplicates").write_text(" ".join(order) + "\n")
        index = index_of(folder, f"--duplicates={folder / 'duplicates'}", "--overwrite=true")
        owners = {key: listed.owner for key in order if (listed := index.alignments_of(key)) is not None}
        assert owners == {KEY: KEY, "5abc_A": "5abc_A", "7abc_A": KEY if order[0] == KEY else "5abc_A"}


def test_an_indexed_store_reads_what_a_folder_reads(tmp_path: Path) -> None:
    """Catches files in another order, sub-folders left out, and entries of a database read at another offset."""
    sto = "# STOCKHOLM 1.0\nq ACDE\nh AKKE\n//\n"
    files = {"b.a3m": ">q\nACDE\n", "uniprot_hits.sto": sto, "a.sto": sto}
    (tmp_path / "mmcif_files").mkdir()
    for name, text in files.items():
        path = tmp_path / "nested" / "1abc_A" / name.partition(".")[2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "databases").mkdir()
    database(tmp_path / "databases", {"1abc_A": files, "2abc_B": {"c.a3m": ">q\nWW\n"}})
    for kind in ("nested", "databases"):
        options = ("--alignment_dir", str(tmp_path / kind), "--structure_dir", str(tmp_path / "mmcif_files"))
        assert main(["data", "index", *options, "--output", str(tmp_path / f"{kind}.index"), "--workers=0"]) == 0
        index = DataIndex(tmp_path / f"{kind}.index")
        plain = ChainFiles(tmp_path / kind, tmp_path / "mmcif_files")
        indexed = ChainFiles(tmp_path / kind, tmp_path / "mmcif_files", index)
        assert indexed.keys() == plain.keys()
        expected, found = plain.alignments("1abc_A"), indexed.alignments("1abc_A")
        assert [alignment.source for alignment in found] == [alignment.source for alignment in expected]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.residues, other.residues)
        assert ["".join(index.sequences_of(row)) for row in range(len(index))] == ["ACDE", "WW"][: len(index)]
        with pytest.raises(UserError, match=r"no chain '1abd_A' in the index.*Did you mean '1abc_A'"):
            indexed.alignments("1abd_A")


def test_an_empty_folder_is_the_query_alone_with_an_index_too(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches chains without homologues that only a run with an index leaves out, chains without any folder that pass for
    such, alignments of an identical chain that are not used, and empty files of which nobody is told."""
    for key in ("1abc_B", "1abc_C", "1abc_D", "1abc_E"):
        (folder / "alignments" / key).mkdir()
    (folder / "alignments" / "1abc_D" / "hits.a3m.part").write_text("x")  # not empty: its alignments may be lost
    (folder / "alignments" / "1abc_E" / "hits.a3m").write_text("")
    text = (folder / "mmcif_files" / "1abc.cif").read_text()
    assert text.count("_entity_poly.pdbx_strand_id") == 1
    (folder / "mmcif_files" / "1abc.cif").write_text(
        re.sub(r"(_entity_poly.pdbx_strand_id\s+)A", r"\g<1>A,B,C,D,E", text)
    )
    (folder / "same.txt").write_text(f"{KEY} 1abc_C\n")
    (folder / "cache.json").write_text(json.dumps({"9abc_A": {"seq": "ACD"}}))
    index = index_of(folder, f"--duplicates={folder / 'same.txt'}", f"--chain_data_cache={folder / 'cache.json'}")
    assert "1 with an empty folder of alignments" in capsys.readouterr().err
    store, plain = store_of(folder, index), store_of(folder)
    assert store.keys() == [KEY, "1abc_B", "1abc_C", "1abc_E", OTHER]
    query = ProteinSequence("q", SEQUENCES[KEY])
    for _ in range(2):
        assert store.alignments("1abc_B", query) == store.alignments("1abc_E", query) == []
    said = [(key, record.message) for record in caplog.records for key in ("1abc_B", "1abc_E") if key in record.message]
    assert [(key, "sequence alone" in line, "is empty" in line) for key, line in said] == [
        ("1abc_B", True, True), ("1abc_E", True, False)]  # fmt: skip
    assert plain.alignments("1abc_B", query) == []
    assert len(store.alignments("1abc_C", query)) == 1
    assert not index.differs("1abc_B", folder / "alignments")
    for key in ("9abc_A", "1abc_D"):
        with pytest.raises(UserError, match=f"no alignment .* of chain '{key}' in the index"):
            store.alignments(key, query)


def test_what_cannot_be_read_is_listed_with_its_reason(folder: Path) -> None:
    """Catches one broken file that ends a scan of a day."""
    (folder / "mmcif_files" / "1abc.cif").write_text("data_x\nloop_\n_a.b\n_a.c\n1\n")
    (folder / "alignments" / "1abc_Q").mkdir()
    shutil.copy(folder / "mmcif_files" / "2abc.cif", folder / "mmcif_files" / "3abc.cif")
    (folder / "alignments" / "3abc_Q").mkdir()
    index = index_of(folder)
    problems = dict(zip(index.keys, index.content.problems, strict=True))
    assert "1abc.cif" in problems[KEY]
    assert "not a valid structure file" in problems[KEY]
    assert "no protein chain 'Q'. Chains: B" in problems["3abc_Q"]
    assert problems[OTHER] == ""


def test_the_output_depends_on_the_inputs_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an order that depends on which process is done first, and parts that are lost at their seams."""
    for number in range(7):
        shutil.copytree(folder / "alignments" / KEY, folder / "alignments" / f"1abc_{number}")
    index_of(folder)
    monkeypatch.setattr(scan, "TASKS_OF_PART", 2)
    assert main([*words(folder, output="other"), "--workers=2"]) == 2  # given twice
    assert (
        main([word for word in words(folder, output="other") if word not in ("--workers", "0")] + ["--workers=2"]) == 0
    )
    assert content(folder / "index") == content(folder / "other")
    assert not list(folder.glob(".*"))


def test_a_rerun_takes_finished_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a scan that begins again after an interruption, and parts of other inputs taken for its own."""
    monkeypatch.setattr(scan, "TASKS_OF_PART", 1)
    scanned: list[str] = []
    original = scan.scan_key

    def interrupted(alignments: Path, structures: Path, task: scan.KeyTask) -> Any:
        scanned.append(task.key)
        if len(scanned) == 2:
            raise KeyboardInterrupt
        return original(alignments, structures, task)

    monkeypatch.setattr(scan, "scan_key", interrupted)
    assert main(words(folder)) == 130
    assert not (folder / "index").exists()
    assert main(words(folder)) == 0
    assert scanned == [KEY, OTHER, OTHER]
    assert main(words(folder, "--overwrite")) == 0  # nothing is left of the first scan
    assert scanned[3:] == [KEY, OTHER]
    scanned[:] = []
    assert main(words(folder, output="third")) == 130
    (folder / "alignments" / "9abc_A").mkdir()
    assert main(words(folder, output="third")) == 0
    assert scanned == [KEY, OTHER, KEY, OTHER, "9abc_A"]


def test_a_changed_source_is_stale(folder: Path) -> None:
    """Catches an index of yesterday's folder that passes for one of today's."""
    cache = folder / "cache.json"
    cache.write_text(json.dumps({KEY: {}}))
    index = index_of(folder, f"--chain_data_cache={cache}")
    assert index.stale_sources() == []
    cache.write_text("{}")
    (folder / "alignments" / "9abc_A").mkdir()
    assert index.stale_sources() == [f"alignment_dir {folder / 'alignments'}", f"chain_data_cache {cache}"]
    cache.unlink()
    os.rename(folder / "mmcif_files", folder / "moved")
    assert index.stale_sources({"structure_dir": folder / "moved"}) == [f"alignment_dir {folder / 'alignments'}"]
    assert index.command.startswith("evodsp data index --alignment_dir ")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("lengths.npy", lambda data: data[:-1], "missing, truncated"),
        ("lengths.npy", None, "missing, truncated"),
        ("index.json", lambda data: data.replace(b'"version": 4', b'"version": 9'), "version 9 of the format"),
        ("index.json", lambda data: b"{}", "not the header of an index"),
        ("index.json", lambda data: data[:40], "not JSON"),
        ("index.json", lambda data: data.replace(b'"lengths"', b'"length"'), "damaged: its checksum"),
        ("index.json", None, "not an index of a data set"),
    ],
)
def test_a_damaged_index_is_one_line(path: Path, name: str, damage: Any, message: str) -> None:
    """Catches a traceback, or worse, the data of half an index."""
    file = path / name
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    with pytest.raises(UserError, match=message) as caught:
        DataIndex(path)
    assert "\n" not in str(caught.value)
    assert "evodsp data index" in str(caught.value)


def test_a_flipped_bit_anywhere_is_noticed_when_it_is_opened(folder: Path) -> None:
    """Catches an index that hands out another sequence, file or date, or ends in a traceback, because of one bit."""
    index, noticed = index_of(folder, "--obsolete", str(obsolete_of(folder))), 0
    expected = rows_of(index)
    generator = np.random.default_rng(0)
    for path in sorted(index.path.iterdir()):
        data = path.read_bytes()
        for at in {len(data) - 1, *generator.integers(0, len(data), 2 if path.name.endswith(".npy") else 40).tolist()}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << int(generator.integers(8))]) + data[at + 1 :])
            try:
                assert rows_of(DataIndex(index.path)) == expected, (path.name, at)
            except UserError:
                noticed += 1
        path.write_bytes(data)
    assert noticed > 100
    assert rows_of(DataIndex(index.path)) == expected


def obsolete_of(folder: Path) -> Path:
    path = folder / "obsolete.dat"
    path.write_text("OBSLTE    31-JUL-94 116L     216L\nOBSLTE    29-JAN-96 125D\n")
    return path


def rows_of(index: DataIndex) -> list[Any]:
    """All that an index says."""
    table, rows = index.table, range(len(index))
    columns = [getattr(table, item.name).tobytes() for item in fields(table)[1:]]
    per_chain = [[index.chains(row), index.structure(row), index.alignments_of(index.keys[row])] for row in rows]
    return [index.keys[:], columns, per_chain, index.content.problems[:], index.sources, index.obsolete]


def test_workers_do_not_compare_checksums_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hundreds of workers that each read the whole index when they start, or to which its columns are sent."""
    index = index_of(folder)
    data = pickle.dumps(store_of(folder, index))
    assert len(data) < 1000
    assert not index.table.lengths.flags.writeable  # mapped, not read

    def fail(self: DataIndex) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(DataIndex, "check", fail)
    assert rows_of(pickle.loads(data).index) == rows_of(index)


def sign(path: Path, header: dict[str, Any]) -> None:
    """Write a header with the checksum that belongs to it."""
    others = {name: value for name, value in header.items() if name != "crc32"}
    own = zlib.crc32(json.dumps(others, sort_keys=True).encode())
    path.write_text(json.dumps({**others, "crc32": own}))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("representatives", np.array([0, 9], np.int32)),
        ("representatives", np.array([-1, 0], np.int32)),
        ("resolutions", np.array([0, 1], np.int32)),
        ("lengths", np.array([[1, 2]], np.int32)),
        ("owner_databases", np.array([-1], np.int32)),
        ("first_files", np.array([0, 5, 2])),
        ("first_files", np.array([1, 1, 2])),
        ("file_lengths", np.array([-1, 0])),
        ("sequences.starts", np.array([0, 30, 26])),
        ("problems.starts", np.array([0, 0])),
        ("first_chains", np.array([0, 0, 2])),  # an index of chains has one in each row
    ],
)
def test_columns_that_do_not_fit_to_each_other(path: Path, name: str, array: np.ndarray) -> None:
    """Catches the IndexError of an index that another program made, whose checksums are right."""
    np.save(path / f"{name}.npy", array)
    header = json.loads((path / "index.json").read_text())
    data = (path / f"{name}.npy").read_bytes()
    header["arrays"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    sign(path / "index.json", header)
    with pytest.raises(UserError, match=r"make it again with 'evodsp data index'"):
        DataIndex(path)


@pytest.mark.parametrize(
    "change",
    [
        {"sources": [{"option": 1, "path": 2, "mtime_ns": 3, "bytes": 4}]},
        {"obsolete": {"1abc": 3}},
        {"of": "ligands"},
        {"arrays": {}},
    ],
)
def test_a_header_of_other_types(path: Path, change: dict[str, Any]) -> None:
    """Catches the KeyError and the TypeError of a header that another program wrote, whose checksum is right."""
    header = json.loads((path / "index.json").read_text())
    sign(path / "index.json", header)
    assert len(DataIndex(path)) == 2
    sign(path / "index.json", {**header, **change})
    with pytest.raises(UserError, match=r"make it again with 'evodsp data index'"):
        DataIndex(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mmcif_cache", "nowhere"], "--mmcif_cache nowhere: is not there"),
        (["--duplicates", "."], "--duplicates .: is a folder"),
        (["--workers=-1"], "--workers is -1"),
    ],
)
def test_wrong_options(folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a scan that begins before its inputs are checked."""
    given = [word for word in words(folder) if word not in ("--workers", "0")]
    assert main([*given, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "index").exists()


def test_outputs_that_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a folder of the user's that is replaced, and an index whose writing makes it stale."""
    assert main(words(folder, output="alignments/index")) == 2
    assert "is inside of --alignment_dir" in capsys.readouterr().err
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").touch()
    assert main(words(folder, "--overwrite", output="full")) == 2
    assert "exists and is not an index" in capsys.readouterr().err
    index_of(folder)
    capsys.readouterr()
    assert main(words(folder)) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert main(words(folder, "--overwrite")) == 0


def test_two_scans_into_one_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches two scans that delete and rename each other's files, the second with a traceback."""
    other = f"error: --output {folder / 'index'}: process {os.getpid()} on {socket.gethostname()} makes an index there"
    with lock(folder / ".index.lock", folder / "index", "makes an index there"):
        assert main(words(folder)) == 2
        said = capsys.readouterr().err
        assert other in said
        assert said.count("\n") == 1
        assert not (folder / "index").exists()
    index_of(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["alignments", "index", "mmcif_files"]


@pytest.mark.verify
def test_a_scan_that_is_killed_ten_times(folder: Path) -> None:
    """Catches a kill that leaves half a part, half an index, processes, or another result than an undisturbed scan."""
    for number in range(12_000):
        chain = folder / "alignments" / f"1abc_{number:05d}"
        chain.mkdir()
        (chain / "hits.a3m").write_text(f">q\n{'A' * (10 + number % 50)}\n")
    given = [*(word for word in words(folder, output="killed") if word not in ("--workers", "0")), "--workers=2"]
    command, environment = [sys.executable, "-m", "evodsp", *given], {**os.environ, "OMP_NUM_THREADS": "1"}

    def seen(pattern: str) -> int:
        return len(list(folder.glob(pattern)))

    for kill in range(10):
        # The last one while the index is written, the others when some more parts are finished.
        pattern = ".killed.[0-9]*.partial" if kill == 9 else ".killed.parts/*.json"
        before = seen(pattern)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and seen(pattern) == before:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
        assert not (folder / "killed").exists()
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert main(words(folder)) == 0
    assert content(folder / "killed") == content(folder / "index")
    assert sorted(path.name for path in folder.iterdir()) == ["alignments", "index", "killed", "mmcif_files"]


def test_a_cluster_works_in_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches relative paths that reach a cluster's workers, which run in other folders than the command."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()

    class Elsewhere:
        def map(self, function: Any, pieces: list[Any]) -> list[tuple[int, Any]]:
            with contextlib.chdir(elsewhere):
                return [(number, function(*piece)) for number, piece in enumerate(pieces)]

    monkeypatch.setattr(scan, "executor", lambda *_: Elsewhere())
    monkeypatch.chdir(folder)
    options = ["--alignment_dir", "alignments", "--structure_dir", "mmcif_files", "--output", "there"]
    assert main(["data", "index", *options, "--scheduler", "tcp://node:1"]) == 0
    assert DataIndex(folder / "there").alignments_of(KEY)
    assert list(elsewhere.iterdir()) == []


def test_a_scheduler_and_the_main_process_cannot_both_scan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `--workers 0` that is ignored."""
    assert main(words(folder, "--scheduler", "tcp://127.0.0.1:1")) == 2
    assert "--workers 0 scans in the main process, but --scheduler" in capsys.readouterr().err


def test_a_plan_of_other_bytes_is_another_plan(tmp_path: Path) -> None:
    """Catches a traceback over the rest of a scan that a full disk or another version has left."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "plan").write_bytes(b"\xff\xfe")
    keep_parts(tmp_path / "parts", "abc")
    assert (tmp_path / "parts" / "plan").read_bytes() == b"abc"
    (tmp_path / "parts" / "kept").touch()
    keep_parts(tmp_path / "parts", "abc")
    assert (tmp_path / "parts" / "kept").exists()
