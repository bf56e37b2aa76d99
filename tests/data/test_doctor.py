"""The examination of a data set: what is wrong with each chain, and whether training can start."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evodsp.cli import main
from evodsp.data.build import build
from evodsp.data.config import BuildConfig
from evodsp.data.doctor import diagnosis as doctor_data
from evodsp.data.doctor import examination
from evodsp.data.doctor.examination import ALIGNED_WITH, Examiner, Overlap, copies_in_one_place, overlap
from evodsp.data.pool import LocalProcesses, Piece, WorkerEndedError
from evodsp.data.similarity.nearest import Copy, copies
from evodsp.data.similarity.sequences import SHORTEST, Words, identity
from evodsp.data.sources.feature_store import encode_record
from evodsp.data.sources.opening import ComplexFiles
from evodsp.training.config import DataConfig, DistillationConfig
from tests.builders.backbone import chain, ligand, pdb_text
from tests.builders.bad_chains import write_sets
from tests.builders.bundled import dimers
from tests.builders.complex_files import write_complex
from tests.builders.random_sequences import changed, random_sequences
from tests.builders.training_chains import BOTH, SEQUENCES, TINY, write_chain

KEY, OTHER = SEQUENCES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good chains and a config of `fit`."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    roots = f"data:\n  alignment_dir: {tmp_path}/alignments\n  structure_dir: {tmp_path}/mmcif_files\n"
    (tmp_path / "tiny.yaml").write_text(TINY.replace("data:\n", roots + BOTH))
    return tmp_path


def spoil(folder: Path) -> None:
    """Of each kind of bad chain one: no structure, another sequence, a structure that is cut."""
    for name in ("3abc_A", "4abc_B"):
        shutil.copytree(folder / "alignments" / OTHER, folder / "alignments" / name)
    shutil.copy(folder / "mmcif_files" / "2abc.cif", folder / "mmcif_files" / "4abc.cif")
    alignment = folder / "alignments" / "4abc_B" / "uniref90_hits.a3m"
    alignment.write_text(f">q\nW{SEQUENCES[OTHER][1:]}\n")
    shutil.copytree(folder / "alignments" / OTHER, folder / "alignments" / "5abc_B")
    text = (folder / "mmcif_files" / "2abc.cif").read_text()
    (folder / "mmcif_files" / "5abc.cif").write_text(text[: text.index("_atom_site.")] + "_atom_site.Cartn_x\n1\n")


def doctor(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    output = folder / "doctor"
    code = main(["data", "doctor", "--output", str(output), "--workers=0", *options])
    return code, json.loads((output / "doctor.json").read_text())


def test_good_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches good data that is refused, a config that is ignored, and figures of other chains."""
    code, report = doctor(folder, "--config", str(folder / "tiny.yaml"))
    assert (code, report["can_start"], report["obstacles"], report["chains"]) == (0, True, [], [])
    assert report["summary"]["training chains that can be used"] == "2 of 2"
    assert report["summary"]["residues, median"] == "13"
    assert report["summary"]["different sequences in the MSA, median"] == "3"
    assert report["summary"]["draws of a chain in an epoch"] == "2"
    assert report["filters"]["unknown release date"] == 2
    assert report["filters"]["resolution above 9 Å"] == 0
    page = (folder / "doctor" / "doctor.html").read_text()
    assert "Training can start." in page
    assert "<svg" in page
    assert not any(word in page for word in ("http:", "https:", "<script", "<link"))
    assert "training can start; report:" in capsys.readouterr().out


def test_a_chain_without_homologues_is_no_bad_chain(folder: Path) -> None:
    """Catches a chain that training reads, with its sequence as only row, reported as unreadable."""
    (folder / "alignments" / KEY / "uniref90_hits.a3m").write_text("")
    code, report = doctor(folder, "--config", str(folder / "tiny.yaml"))
    assert (code, report["chains"]) == (0, [])


@pytest.mark.parametrize("indexed", [False, True])
def test_each_bad_chain_is_named_with_its_reason(folder: Path, indexed: bool) -> None:
    """Catches a kind of bad chain that is not found, or is reported as another kind."""
    spoil(folder)
    options = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    if indexed:
        assert main(["data", "index", *options, "--output", str(folder / "index"), "--workers=0"]) == 0
        options += ["--index", str(folder / "index")]
    code, report = doctor(folder, *options)
    states = {entry["chain"]: (entry["state"], entry["reason"]) for entry in report["chains"]}
    assert set(states) == {"3abc_A", "4abc_B", "5abc_B"}
    assert states["3abc_A"] == ("missing", "no structure")
    assert states["4abc_B"][0] == "mismatching"
    assert "position 1," in states["4abc_B"][1]
    assert states["5abc_B"][0] == "unreadable"
    assert "5abc.cif" in states["5abc_B"][1]
    counts = report["counts"]
    assert [counts[f"read{kind}"] for kind in ("", ", alignments of another sequence", ", unreadable")] == [4, 1, 1]
    assert (code, report["obstacles"]) == (1, ["2 of 4 training chains read are bad (more than 5%)"])
    code, report = doctor(folder, *options, "--max_bad=0.5")
    assert (code, report["can_start"]) == (0, True)


def test_a_chain_that_ends_its_process_is_unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a doctor that ends with the process of one chain, or counts a chain that nobody could read as good."""
    pieces_of = LocalProcesses.map

    def killed(
        self: LocalProcesses, function: Callable[..., Any], pieces: Sequence[Piece]
    ) -> Iterator[tuple[int, Any]]:
        for number, result in pieces_of(self, function, pieces):
            yield number, WorkerEndedError("its process was killed") if pieces[number][1] == OTHER else result

    monkeypatch.setattr(LocalProcesses, "map", killed)
    code, report = doctor(folder, "--config", str(folder / "tiny.yaml"))
    states = {entry["chain"]: (entry["state"], entry["reason"]) for entry in report["chains"]}
    assert states == {OTHER: ("unreadable", "its process was killed")}
    assert (code, report["obstacles"]) == (1, ["1 of 2 training chains read are bad (more than 5%)"])


def written(folder: Path, name: str, **data: Any) -> str:
    """A config of `fit` with further settings of `data`; its path."""
    content = yaml.safe_load((folder / "tiny.yaml").read_text())
    content["data"] |= data
    (folder / name).write_text(yaml.safe_dump(content))
    return str(folder / name)


def test_the_cache_and_the_filters_of_the_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a data set called good of which the run's filters leave nothing, counts by other limits than the run's, and
    chains read that training never draws."""
    facts = {"release_date": "2010-01-01", "seq": SEQUENCES[KEY], "cluster_size": 3}
    entries = {KEY: {**facts, "resolution": 3.5}, OTHER: {**facts, "resolution": 2.5, "release_date": "2020-01-01"}}
    (folder / "cache.json").write_text(json.dumps(entries))
    cache = {"chain_data_cache": str(folder / "cache.json")}
    code, report = doctor(folder, "--config", written(folder, "a.yaml", **cache, filters={"max_resolution": 3.0}))
    assert (code, report["left_out"], report["filters"]["resolution above 3 Å"]) == (0, {"resolution above 3 Å": 1}, 1)
    assert report["filters"]["unknown cluster size"] == 0
    assert report["summary"]["training chains that the filters leave"] == "1"
    assert (report["summary"]["draws of a chain in an epoch"], report["counts"]["read"]) == ("4", 1)
    assert f"all training chains in {folder}" in (page := (folder / "doctor" / "doctor.html").read_text())
    assert "The filters leave out these chains" in page
    dated = {"max_resolution": 3.0, "max_release_date": "2018-04-30"}
    code, report = doctor(folder, "--config", written(folder, "b.yaml", **cache, filters=dated))
    reasons = "1 resolution above 3 Å, 1 released after 2018-04-30"
    assert (code, report["obstacles"]) == (1, [f"data.filters: 0 of 2 training chains; left out: {reasons}"])
    (folder / "cache.json").write_text(json.dumps({OTHER: entries[OTHER]}))
    code, report = doctor(folder, "--config", written(folder, "c.yaml", **cache))
    assert (code, report["left_out"]) == (0, {f"not in {folder / 'cache.json'}": 1})
    code, report = doctor(folder, "--config", written(folder, "d.yaml", filters={"max_resolution": 1.0}))
    assert (code, report["left_out"]) == (1, {"resolution above 1 Å": 2}), "facts come from the files"
    assert "in their files" in (folder / "doctor" / "doctor.html").read_text()
    code, report = doctor(folder, "--config", written(folder, "e.yaml"))
    assert (code, report["left_out"]) == (0, {})
    assert "No filter is applied." in (folder / "doctor" / "doctor.html").read_text()
    for data, message in (
        ({"sampling": "alphafold2"}, "data.chain_data_cache and data.index are null"),
        ({"sampling": "often"}, "data.sampling is 'often', but must be uniform or alphafold2"),
        ({"filters": {"resolution": 3}}, "data.filters is {'resolution': 3}, but may hold numbers max_resolution"),
        ({"filters": {"max_residue_share": 2}}, "data.filters.max_residue_share is 2"),
    ):
        assert main(["data", "doctor", "--output", "x", "--config", written(folder, "e.yaml", **data)]) == 2
        assert message in capsys.readouterr().err


def test_the_self_distillation_set_of_the_config(tmp_path: Path) -> None:
    """Catches predictions that are missing, bad or filtered out, of which the doctor says nothing, and a set examined without
    its index or with the filters of the experiments."""
    config = yaml.safe_load(write_sets(tmp_path).read_text())
    predictions = tmp_path / "predictions"
    (predictions / "alignments" / "3abc_A").mkdir()
    roots = ["--alignment_dir", str(predictions / "alignments"), "--structure_dir", str(predictions / "mmcif_files")]
    assert main(["data", "index", *roots, "--output", str(tmp_path / "index"), "--workers=0"]) == 0
    sets = config["data"]["distillation"] | {
        "index": str(tmp_path / "index"),
        "sampling": "alphafold2",
        "fraction": 0.5,
    }

    def examined(*options: str, **changes: Any) -> tuple[int, dict[str, Any]]:
        data = config["data"] | {"distillation": {**sets, **changes}}
        (tmp_path / "given.yaml").write_text(yaml.safe_dump(config | {"data": data}))
        return doctor(tmp_path, "--config", str(tmp_path / "given.yaml"), *options)

    code, report = examined()
    found = report["distillation"]
    assert (code, report["obstacles"]) == (0, [])
    assert found["chains"] == [{"chain": "3abc_A", "state": "missing", "reason": "no structure"}]
    assert found["summary"]["distillation chains that can be used"] == "4 of 5"
    assert [part["summary"]["draws of a chain in an epoch"] for part in (report, found)] == ["0.5", "0.5"]
    assert (found["counts"]["read"], found["left_out"], found["stale"]) == (4, {}, [])
    assert "unknown resolution" in report["filters"]
    assert "unknown resolution" not in found["filters"]
    page = (tmp_path / "doctor" / "doctor.html").read_text()
    assert "Self-distillation set" in page
    assert f"{predictions / 'alignments'}, {predictions / 'mmcif_files'}, {tmp_path / 'index'}" in page

    code, report = examined(filters={"max_residue_share": 0.1})
    reason = "data.distillation.filters: 0 of 4 distillation chains; left out: 4 more than 10% of one residue type"
    assert (code, report["obstacles"]) == (1, [reason])
    code, report = examined(min_plddt=95.0)
    assert (code, report["obstacles"]) == (1, ["4 of 4 distillation chains read are bad (more than 5%)"])
    assert "no residue of a pLDDT of at least 95" in report["distillation"]["chains"][0]["reason"]
    code, report = examined(index=None, sampling="uniform", chains=["9abc_A"])
    assert (code, report["obstacles"]) == (1, ["no distillation chain has alignments and structure"])
    assert main(["data", "build", *roots, "--output", str(tmp_path / "store"), "--min_plddt=50", "--workers=1"]) == 0
    code, report = examined(store=str(tmp_path / "store"), index=None, sampling="uniform", alignment_dir="nowhere")
    assert (code, report["distillation"]["counts"]["read"], report["distillation"]["chains"]) == (0, 4, [])
    assert "size of a feature store, about" not in report["distillation"]["summary"]


def test_a_feature_store_is_examined(folder: Path) -> None:
    """Catches folders examined that a run with data.store does not read, and damaged records that pass."""
    roots = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    assert main(["data", "build", *roots, "--output", str(folder / "store"), "--workers=1"]) == 0
    given = {"alignment_dir": "nowhere", "structure_dir": "nowhere", "store": str(folder / "store")}
    config = written(folder, "a.yaml", **given, train_chains=[KEY, OTHER, "3abc_A"])
    code, report = doctor(folder, "--config", config)
    assert (code, report["counts"]["read"], report["counts"]["without a record"]) == (0, 2, 1)
    assert not [name for name in report["counts"] if "pairing" in name or "one chain" in name]  # of complexes alone
    assert report["chains"] == [{"chain": "3abc_A", "state": "missing", "reason": "no record"}]
    (shard,) = (folder / "store" / "chains").glob("*.tar")
    data = bytearray(shard.read_bytes())
    data[1000:1010] = bytes(10)
    shard.write_bytes(data)
    code, report = doctor(folder, "--config", config)
    assert (code, report["counts"]["read, unreadable"]) == (1, 1)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_scored_chains_must_all_be_good(folder: Path, part: str) -> None:
    """Catches a missing validation chain that ends the run at its first validation, and a missing test chain that `evodsp test`
    finds after the training."""
    spoil(folder)
    chains = {f"{part}_chains": [KEY, "3abc_A", "4abc_B"]}
    code, report = doctor(folder, "--config", written(folder, "other.yaml", **chains), "--max_bad=1")
    assert (code, report["obstacles"]) == (1, [f"1 {part} chains are missing", f"1 {part} chains are bad"])
    states = {row["chain"]: row["state"] for row in report["chains"]}
    assert states == {"3abc_A": f"{part} chain missing", "4abc_B": f"{part} chain mismatching"}


def test_files_that_are_newer_than_the_index_and_structures_without_alignments(folder: Path) -> None:
    """Catches a search that was added to the folders and is not used, files that are gone, and good data called stale."""
    options = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    shutil.copy(folder / "mmcif_files" / "2abc.cif", folder / "mmcif_files" / "4ABC.cif")
    assert main(["data", "index", *options, "--output", str(folder / "index"), "--workers=0"]) == 0
    options += ["--index", str(folder / "index")]
    _, report = doctor(folder, *options)
    assert report["stale"] == []
    assert report["structures_without_alignments"] == ["4abc"]
    assert report["summary"]["structures without alignments"] == "1"
    assert "4abc" in (folder / "doctor" / "doctor.html").read_text()
    first = folder / "alignments" / KEY / "uniref90_hits.a3m"
    (first.parent / "a3m").mkdir()
    shutil.copy(first, first.parent / "a3m" / "bfd_hits.a3m")
    second = folder / "alignments" / OTHER / "uniref90_hits.a3m"
    for change in (lambda: None, lambda: second.write_text(second.read_text() + ">r9\n" + SEQUENCES[OTHER] + "\n")):
        change()
        (stale,) = doctor(folder, *options)[1]["stale"]
    assert stale == f"the files of 2 of 2 chains that were read, such as {KEY}"


@pytest.mark.parametrize("indexed", [False, True])
def test_several_structures_in_the_folder_of_a_chain_are_named(folder: Path, indexed: bool) -> None:
    """Catches one of them taken without a word, a scan that they end, and a chain without a structure for no reason given."""
    place = folder / "mmcif_files" / OTHER / "cif"
    place.mkdir(parents=True)
    shutil.copy(folder / "mmcif_files" / "2abc.cif", place / "first.cif")
    (folder / "mmcif_files" / "2abc.cif").rename(place / "second.cif")
    options = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    if indexed:
        assert main(["data", "index", *options, "--output", str(folder / "index"), "--workers=0"]) == 0
        options += ["--index", str(folder / "index")]
    _, report = doctor(folder, *options)
    (chain,) = report["chains"]
    assert (chain["chain"], chain["state"]) == (OTHER, "missing" if indexed else "unreadable")
    (reason,) = report["unreadable_headers"] if indexed else [chain["reason"]]
    assert "2abc_B: several structures of the chain (first.cif, second.cif); keep one" in reason


def test_a_sample_is_read(folder: Path) -> None:
    """Catches a data set of a week's reading that is read whole, and a draw that changes from run to run."""
    options = ["--config", str(folder / "tiny.yaml"), "--sample=1"]
    first, second = (doctor(folder, *options)[1] for _ in range(2))
    assert first["counts"]["read"] == 1
    assert first["filters"] == second["filters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no alignment_dir; give --alignment_dir"),
        (["--config=nowhere.yaml"], "nowhere.yaml: cannot be read (No such file or directory); check the path"),
        (["--max_bad=2"], "--max_bad is 2"),
        (["--alignment_dir=nowhere", "--structure_dir=."], "nowhere: no such alignment directory"),
    ],
)
def test_a_users_mistake_is_one_line(
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a traceback, and a mistake that looks like bad data (exit code 1)."""
    monkeypatch.chdir(tmp_path)
    assert main(["data", "doctor", "--output", "report", *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_defaults_are_those_of_a_run() -> None:
    """Catches a default of `evodsp fit` that changes: the doctor, a floor below, writes it again."""
    run, of_set = DataConfig, DistillationConfig()
    assert run.samples_per_epoch == doctor_data._EPOCH
    assert (of_set.fraction, of_set.min_plddt) == (doctor_data._FRACTION, doctor_data._MIN_PLDDT)


def test_notes_of_structures(folder: Path) -> None:
    """Catches residues that were left out of a chain, or a chain that breaks, of which the report says nothing."""
    residues = chain(("GLY", "SER", "TRP"), chain=KEY[-1])
    text = pdb_text([*residues, ligand("GLY", 99, chain=KEY[-1])])
    (folder / "mmcif_files" / f"{KEY[:4]}.cif").unlink()
    (folder / "mmcif_files" / f"{KEY[:4]}.pdb").write_text(text)
    (folder / "alignments" / KEY / "uniref90_hits.a3m").write_text(">q\nGSW\n")
    code, report = doctor(folder, "--config", str(folder / "tiny.yaml"))
    reason = f"residues with N, CA and C that no peptide bond joins to chain '{KEY[-1]}' are left out: GLY 99"
    assert (code, report["chains"]) == (
        0,
        [{"chain": KEY, "state": "usable, with a note on its structure", "reason": reason}],
    )
    assert report["counts"]["read, with a note on the structure"] == 1


# What the training, validation and test chains of a run have in common.


SETS = ("training", "validation")


def alike(first: dict[str, str], second: dict[str, str]) -> Overlap:
    """The overlap of two sets of single chains."""
    return overlap(SETS, *({key: (one,) if one else () for key, one in part.items()} for part in (first, second)))


def test_identity_is_that_of_the_shorter_sequence() -> None:
    """Catches a share of the longer one, X that counts as identical, gaps at the ends that cost, and gaps never made."""
    (letters,) = random_sequences(1, 100)
    assert identity(letters, letters) == 1
    assert identity(letters, letters[20:70]) == identity(letters[20:70], letters) == 1
    assert identity("WW" + letters, letters + "GG") == 100 / 102
    assert identity(letters, letters[:50] + "WWW" + letters[50:]) == 1
    assert identity(letters, changed(letters, 5)) == pytest.approx(0.8, abs=0.01)
    assert identity(letters[:40], f"{letters[:30]}XXXXX{letters[35:40]}") == 35 / 40
    assert identity("AAXX", "AAXX") == 0.5


def test_what_two_sets_have_in_common() -> None:
    """Catches a chain, a copy under another name or a relative that is not found among others, a copy of a chain that is in
    both sets, and peptides that are called alike."""
    first = {f"t{number}": sequence for number, sequence in enumerate(random_sequences(300, 60))}
    peptide = first["t0"][: SHORTEST - 1]
    second = {
        "near": changed(first["t123"], 5),
        "t7": first["t7"],
        "copy": first["t299"],
        "copy of both": first["t7"],
        "far": "".join(reversed(first["t9"])),
        "part": first["t50"][10:40],
        "lower": "x" * 30,
        "peptide": peptide,
        "nameless": "",
    }
    found = alike({**first, "peptide 2": peptide, "short": peptide[:-1]}, second)
    assert (found.sets, found.chains, found.unknown, found.highest) == (SETS, ["t7"], 1, 1.0)
    assert sorted(found.same_sequence) == [("peptide 2", "peptide"), ("t299", "copy"), ("t7", "copy of both")]
    best = [(near.first, near.second, round(near.identity, 2)) for near in found.nearest[:2]]
    assert best == [("t50", "part", 1.0), ("t123", "near", 0.8)]
    assert {near.second for near in found.nearest} <= {"part", "near", "far"}
    assert 0 < found.alignments <= 9
    alone = alike(first, {"near": second["near"]})
    assert (alone.chains, alone.same_sequence, alone.highest) == ([], [], pytest.approx(0.8, abs=0.01))
    assert alike(first, {"lower": "x" * 30}).highest is None


def test_words_in_common_are_a_share_of_the_fewer() -> None:
    """Catches a piece of a long sequence that is ranked behind one of its own length."""
    piece = "ACDEFGHIKL"
    longer = f"{piece}MNPQRSTVWY"
    assert Words([piece, longer, "W" * 20, longer[5:]]).shares_with(piece).tolist() == [1.0, 1.0, 0.0, 2 / 7]
    assert Words([piece]).shares_with(longer).tolist() == [1.0]


def test_a_chain_is_aligned_with_several() -> None:
    """Catches one nearest sequence by words that hides the others, of which another may be nearer by its alignment."""
    (letters,) = random_sequences(1, 120)
    relatives = {f"every {every}": changed(letters, every) for every in (30, 20, 15, 12, 10)}
    assert alike(relatives, {"it": letters}).alignments == ALIGNED_WITH


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    """Five chains of two sequences and their relatives, and a config whose three sets overlap."""
    one, two = random_sequences(2, 40)
    chains = {"1abc_A": one, "2abc_A": two, "3abc_A": changed(one, 8), "4abc_A": two, "5abc_A": changed(two, 4)}
    for key, letters in chains.items():
        write_chain(tmp_path, key, letters)
    content = yaml.safe_load(TINY)
    content["data"] |= {
        "alignment_dir": f"{tmp_path}/alignments", "structure_dir": f"{tmp_path}/mmcif_files",
        "train_chains": ["1abc_A", "2abc_A"], "validation_chains": ["3abc_A", "1abc_A"], "test_chains": ["4abc_A", "3abc_A"],
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


@pytest.mark.parametrize("indexed", [False, True])
def test_the_doctor_reports_leaks(leaky: Path, capsys: pytest.CaptureFixture[str], indexed: bool) -> None:
    """Catches `data.test_chains` that nobody reads, chains of training that are not compared because they are not read, and
    a report that says so in one place only."""
    options = [
        "--config",
        str(leaky / "config.yaml"),
        "--output",
        str(leaky / "doctor"),
        "--workers=0",
        "--sample=1",
    ]
    if indexed:
        roots = [
            "--alignment_dir",
            str(leaky / "alignments"),
            "--structure_dir",
            str(leaky / "mmcif_files"),
        ]
        assert main(["data", "index", *roots, "--output", str(leaky / "index"), "--workers=0"]) == 0
        options += ["--index", str(leaky / "index")]
    assert main(["data", "doctor", *options]) == 0
    out = capsys.readouterr().out
    report = json.loads((leaky / "doctor" / "doctor.json").read_text())
    found = {tuple(part["sets"]): part for part in report["overlaps"]}
    first, second = found["training", "validation"], found["training", "test"]
    assert (first["chains"], first["same_sequence"]) == (["1abc_A"], [])
    (near,) = first["nearest"]
    assert (near["first"], near["second"], near["identity"]) == ("1abc_A", "3abc_A", pytest.approx(0.875, abs=0.026))
    assert (second["chains"], second["same_sequence"], second["highest"]) == ([], [["2abc_A", "4abc_A"]], 1.0)
    assert found["validation", "test"]["chains"] == ["3abc_A"]
    assert (
        "training and validation: 1 chain in both, 0 others with equal sequences, highest identity 100.0% (1abc_A);"
        in out
    )
    assert "1 others with equal sequences, highest identity 100.0% (2abc_A and 4abc_A);" in out
    assert "warning: validation: 1 of 2 scored chains are trained on, such as 1abc_A: their scores do not say" in out
    assert "warning: test: 1 of 2 scored chains are trained on, such as 4abc_A, whose sequence 2abc_A has" in out
    assert (report["copied"], "copying the nearest" in out) == ([], False), "no bar where chains are trained on"
    page = (leaky / "doctor" / "doctor.html").read_text()
    assert "Training, validation and test" in page
    for text in (out, page):
        assert "as a share of the shorter sequence" in text
        assert "whose sequence 2abc_A has" in text


def test_the_doctor_takes_the_options_of_a_run(leaky: Path) -> None:
    """Catches a data set of one's own that cannot be examined as it is trained on, held-out chains among the training chains,
    and relatives of them that the doctor still counts."""
    words = [
        "data",
        "doctor",
        f"--alignment_dir={leaky}/alignments",
        f"--structure_dir={leaky}/mmcif_files",
    ]
    words += [
        f"--output={leaky}/doctor",
        "--workers=0",
        "--validation_chains",
        "[1abc_A]",
        "--test_chains",
        "[5abc_A]",
    ]

    def examined(*options: str) -> dict[str, Any]:
        assert main([*words, *options]) == 0
        found: dict[str, Any] = json.loads((leaky / "doctor" / "doctor.json").read_text())
        return found

    report = examined()
    assert report["summary"]["training chains that can be used"] == "3 of 3"
    assert report["counts"]["of validation or test, left out"] == 2
    assert [part["chains"] for part in report["overlaps"]] == [[], [], []]
    (leaky / "held_out.txt").write_text("1abc_A\n5abc_A\n")
    report = examined("--exclude_like", str(leaky / "held_out.txt"), "--exclude_identity", "0.8")
    assert report["left_out"] == {"alike those of data.exclude_like (more than 80% identical)": 1}
    assert {near["first"] for part in report["overlaps"] for near in part["nearest"]} <= {"2abc_A", "4abc_A", "1abc_A"}
    assert main([*words, "--exclude_identity", "0.8"]) == 2, "an identity, and nothing that is excluded by it"


# The doctor on complexes: what is wrong with each, what two sets share, and the bar.


ENTRIES = ("c001", "c002", "c005", "c036")
"""Two heterodimers of a family for training, a third one, and a homodimer."""


def copy_dimers(folder: Path) -> None:
    """Folders of these entries, and a config of `fit` on them."""
    for entry in ENTRIES:
        (folder / "mmcif_files").mkdir(exist_ok=True)
        shutil.copy(dimers() / "mmcif_files" / f"{entry}.cif.gz", folder / "mmcif_files")
        for place in dimers().glob(f"alignments/{entry}_*"):
            shutil.copytree(place, folder / "alignments" / place.name)
    data = {
        "alignment_dir": f"{folder}/alignments", "structure_dir": f"{folder}/mmcif_files",
        "train_chains": ["c001", "c002", "c036"], "validation_chains": ["c005"],
    }  # fmt: skip
    config = {"model": {"preset": "test", "arrangement": "multimer"}, "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def of_config(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    return doctor(folder, "--config", str(folder / "config.yaml"), *options)


def test_complexes_without_a_config(tmp_path: Path) -> None:
    """Catches folders of complexes that only a config lets the doctor examine: their chains would be examined one by one."""
    copy_dimers(tmp_path)
    roots = ["--alignment_dir", f"{tmp_path}/alignments", "--structure_dir", f"{tmp_path}/mmcif_files"]
    code, report = doctor(tmp_path, *roots, "--complexes=true", "--sample=2")
    assert code == 0
    assert report["summary"]["training complexes that can be used"] == "4 of 4"


def test_good_complexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a doctor that looks for chains, residues of one chain for all, and leaks and a bar of complexes that are not
    said."""
    copy_dimers(tmp_path)
    code, report = of_config(tmp_path)
    out = capsys.readouterr().out
    assert (code, report["obstacles"], report["chains"]) == (0, [], [])
    assert report["summary"]["training complexes that can be used"] == "3 of 3"
    assert report["summary"]["residues, median"] == "64"
    assert report["summary"]["size of a feature store, about"].endswith(" kB")
    (part,) = report["overlaps"]
    assert (part["chains"], part["same_sequence"]) == ([], [])
    assert all(near["identity"] > 0.4 for near in part["covered"])
    assert f"0 others with equal sequences, {len(part['covered'])} others known from training, highest identity" in out
    (bar,) = report["copied"]
    assert 0 < bar["interface_lddt_ca"] < bar["lddt_ca"] < 1
    assert [copy["nearest"] in ("c001", "c002") for copy in bar["copies"]] == [True]
    assert f"validation: copying the nearest training complex scores lDDT-CA {bar['lddt_ca']:.3f} and interface" in out
    page = (tmp_path / "doctor" / "doctor.html").read_text()
    assert "Chains of a complex (complexes read)" in page


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_size_in_a_store_counts_each_array_of_a_complex(entry: str) -> None:
    """Catches an estimate without the rows for pairing (a fifth of these), or with one copy's coordinates for all."""
    files = ComplexFiles(dimers() / "alignments", dimers() / "mmcif_files")
    stored = len(encode_record(files.parsed(entry)))
    assert 0.75 < Examiner(files).examine(entry).packed_bytes / stored < 1


def test_each_fault_is_named(tmp_path: Path) -> None:
    """Catches each thing that makes a complex useless in training, or less useful, without a word."""
    copy_dimers(tmp_path)
    alignments, structures = tmp_path / "alignments", tmp_path / "mmcif_files"

    def text_of(entry: str, text: str | None = None) -> str:
        path = structures / f"{entry}.cif.gz"
        if text is not None:
            path.write_bytes(gzip.compress(text.encode()))
        return gzip.decompress(path.read_bytes()).decode()

    for entry in ("d1", "d2", "d3", "d4", "d5", "d6"):
        shutil.copy(structures / "c001.cif.gz", structures / f"{entry}.cif.gz")
        for name in "AB":
            shutil.copytree(alignments / f"c001_{name}", alignments / f"{entry}_{name}")
    shutil.rmtree(alignments / "d1_B")
    (alignments / "d2_B" / "uniprot_hits.a3m").unlink()
    hits = alignments / "d3_A" / "uniprot_hits.a3m"
    hits.write_text(hits.read_text().replace("|", ".", 4))
    whole = text_of("d4")
    text_of("d4", whole[: whole.rindex("ATOM") + 9])
    text_of("d5", whole.replace("oper_expression 1", "oper_expression 7"))
    text_of("d6", whole.replace("asym_id_list A,B", "asym_id_list A"))
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    data["data"]["train_chains"] = ["c001", "d1", "d2", "d3", "d4", "d5", "d6"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    code, report = of_config(tmp_path)
    found = {row["chain"]: (row["state"], row["reason"]) for row in report["chains"]}
    assert (code, list(found)) == (1, ["d1", "d4", "d5", "d2", "d3", "d6"])
    assert "no alignments of d1_B; run the search" in found["d1"][1]
    assert found["d2"][0] == found["d3"][0] == "usable, with a note on its rows for pairing"
    assert found["d2"][1].startswith("chain B: no rows to pair with other chains (uniprot_hits.sto or .a3m")
    assert found["d3"][1] == "chain A: 2 of 47 rows have no name to be paired by"
    assert "truncated" in found["d4"][1]
    assert "assembly 1 needs the operator '7', which the file does not list" in found["d5"][1]
    assert found["d6"] == ("good, one chain only", "nothing is paired")
    assert report["counts"]["read, of one chain only"] == 1
    assert report["counts"]["read, with a note on rows for pairing"] == 2
    assert report["obstacles"] == ["3 of 7 training complexes read are bad (more than 5%)"]


def test_copies_in_one_place(tmp_path: Path) -> None:
    """Catches an operator that moves nothing, and chains that are called copies because they touch."""
    assembly = ComplexFiles(*write_complex(tmp_path, apart=0.0)).assembly_of("1abc")
    (note,) = copies_in_one_place(assembly)
    assert note.startswith("chains A and B lie in the same place (")
    (tmp_path / "apart").mkdir()
    apart = ComplexFiles(*write_complex(tmp_path / "apart", apart=2.0)).assembly_of("1abc")
    assert copies_in_one_place(apart) == []


def test_a_complex_that_is_known_from_training() -> None:
    """Catches complexes that are called alike because of one chain, or of chains of two complexes, peptides that decide,
    and the nearest complex that is the one with the least alike chain."""
    one, two, three, antigen, far = random_sequences(5, 60)
    peptide = far[: SHORTEST - 1]
    first = {"t1": (one, two), "t2": (antigen, three), "t3": (two,), "both": (far, far)}
    second = {
        "near": (changed(one, 3), changed(two, 5), peptide),
        "antigen": (antigen, far[::-1]),
        "two of them": (one, three),
        "same": (two, one, one),
        "both": (one,),
        "unknown": (),
        "copies": (changed(two, 6), changed(two, 6)),
        "more of t2": (changed(three, 9), changed(one, 6)),
        "more of t1": (changed(three, 6), changed(one, 9)),
    }
    found = overlap(SETS, first, second)
    assert (found.chains, found.same_sequence, found.unknown) == (["both"], [("t1", "same")], 1)
    assert found.covered is not None
    assert [(near.first, near.second) for near in found.covered] == [("t1", "copies"), ("t1", "near")]
    assert found.covered[1].identity == pytest.approx(0.66, abs=0.02)
    nearest = {near.second: (near.first, round(near.identity, 1)) for near in found.nearest}
    assert nearest["antigen"] == ("t2", 1.0)
    assert (nearest["more of t2"][0], nearest["more of t1"][0]) == ("t2", "t1")
    assert set(nearest) == {"near", "antigen", "two of them", "copies", "more of t2", "more of t1"}
    assert overlap(SETS, first, {}).covered == []


def test_which_complexes_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches complexes that are hidden by those of which one chain is nearer."""
    monkeypatch.setattr(examination, "FEWEST_ALIGNED", 1)
    monkeypatch.setattr(examination, "PAIRS_ALIGNED", 1)
    one, two, *others = random_sequences(12, 60)
    first = {f"t{number}": (changed(one, 20), letters) for number, letters in enumerate(others)}
    first["both"] = changed(one, 7), changed(two, 7)
    (near,) = overlap(SETS, first, {"new": (one, two)}).covered or []
    assert near.first == "both"


def test_a_copy_is_scored_for_its_best_exchange_of_chains(tmp_path: Path) -> None:
    """Catches copies of a homodimer that are compared with each other's places."""
    read = ComplexFiles(*write_complex(tmp_path, apart=10.0)).assembly_of
    true = read("1abc")
    swapped = replace(true, pdb_id="2abc", chains=(true.chains[1], true.chains[0], true.chains[2]))
    sequences = tuple(chain.sequence for chain in true.chains)
    of = {"1abc": true, "2abc": swapped}.__getitem__
    ((name, copy),) = copies({"1abc": sequences}, {"2abc": sequences}, of, of, workers=0)
    assert isinstance(copy, Copy)
    assert (name, copy.nearest, copy.coverage) == ("1abc", "2abc", 1.0)
    assert (copy.lddt_ca, copy.interface_lddt_ca) == (pytest.approx(1.0), pytest.approx(1.0))
    assert np.isclose(copy.identity, 1.0)


def test_a_store_is_examined_in_place_of_folders(tmp_path: Path) -> None:
    """Catches a check-up that looks at folders which the run does not read, and one that finds less in a store."""
    copy_dimers(tmp_path)
    of_files = of_config(tmp_path)
    store = tmp_path / "store"
    build(BuildConfig(tmp_path / "alignments", tmp_path / "mmcif_files", store, complexes=True, workers=1))
    for name in ("alignments", "mmcif_files"):
        shutil.rmtree(tmp_path / name)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["data"]["store"] = str(store)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    code, found = of_config(tmp_path)
    assert code == of_files[0] == 0
    assert found["counts"].pop("without a record") == 0
    to_build = [name for name in of_files[1]["summary"] if name not in found["summary"]]
    assert [name.split()[0] for name in to_build] == ["size", "time"]  # a store need not be built of one
    for name in to_build:
        del of_files[1]["summary"][name]
    assert found == of_files[1]
