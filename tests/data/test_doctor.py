"""The examination of a data set: what is wrong with each chain, and whether training can start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from evodsp.cli import main
from evodsp.data.doctor import diagnosis as doctor_data
from evodsp.data.pool import LocalProcesses, Piece, WorkerEndedError
from evodsp.training.config import DataConfig, DistillationConfig
from tests.builders.backbone import chain, ligand, pdb_text
from tests.builders.bad_chains import write_sets
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


def test_validation_chains_must_all_be_good(folder: Path) -> None:
    """Catches a missing validation chain that ends the run at its first validation."""
    spoil(folder)
    for chains, obstacle in (
        ("[3abc_A]", "1 validation chains are missing"),
        ("[4abc_B]", "1 validation chains are bad"),
    ):
        text = (folder / "tiny.yaml").read_text()
        (folder / "other.yaml").write_text(text.replace("validation_chains: [1abc_A]", f"validation_chains: {chains}"))
        code, report = doctor(folder, "--config", str(folder / "other.yaml"), "--max_bad=1")
        assert (code, report["obstacles"]) == (1, [obstacle])


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
