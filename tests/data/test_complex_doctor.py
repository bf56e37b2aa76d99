"""The doctor on complexes: what is wrong with each, what two sets share, and the bar."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evodsp.cli import main
from evodsp.data.build import build
from evodsp.data.config import BuildConfig
from evodsp.data.doctor import examination
from evodsp.data.doctor.examination import Examiner, copies_in_one_place, overlap
from evodsp.data.similarity.nearest import Copy, copies
from evodsp.data.similarity.sequences import SHORTEST
from evodsp.data.sources.feature_store import encode_record
from evodsp.data.sources.opening import ComplexFiles
from tests.builders.bundled import dimers
from tests.builders.complex_files import write_complex
from tests.builders.random_sequences import changed, random_sequences

SETS = ("training", "validation")
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


def doctor(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    words = [
        "data",
        "doctor",
        "--config",
        str(folder / "config.yaml"),
        "--output",
        str(folder / "doctor"),
        "--workers=0",
    ]
    code = main([*words, *options])
    return code, json.loads((folder / "doctor" / "doctor.json").read_text())


def test_complexes_without_a_config(tmp_path: Path) -> None:
    """Catches folders of complexes that only a config lets the doctor examine: their chains would be examined one by one."""
    copy_dimers(tmp_path)
    roots = ["--alignment_dir", f"{tmp_path}/alignments", "--structure_dir", f"{tmp_path}/mmcif_files", "--workers=0"]
    assert main(["data", "doctor", *roots, "--complexes=true", "--sample=2", "--output", str(tmp_path / "doctor")]) == 0
    report = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert report["summary"]["training complexes that can be used"] == "4 of 4"


def test_good_complexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a doctor that looks for chains, residues of one chain for all, and leaks and a bar of complexes that are not
    said."""
    copy_dimers(tmp_path)
    code, report = doctor(tmp_path)
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
        for chain in "AB":
            shutil.copytree(alignments / f"c001_{chain}", alignments / f"{entry}_{chain}")
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
    code, report = doctor(tmp_path)
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


def test_an_index_that_is_old(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches complexes that the index lists otherwise, and a change of the folders that is not said."""
    copy_dimers(tmp_path)
    index = tmp_path / "index"
    roots = [f"--alignment_dir={tmp_path}/alignments", f"--structure_dir={tmp_path}/mmcif_files", f"--output={index}"]
    assert main(["data", "index", "--complexes=true", "--workers=0", *roots]) == 0
    shutil.copy(tmp_path / "mmcif_files" / "c002.cif.gz", tmp_path / "mmcif_files" / "c001.cif.gz")
    (tmp_path / "alignments" / "x_A").mkdir()
    code, report = doctor(tmp_path, f"--index={index}", "--max_bad=1")
    assert code == 0
    assert [row["chain"] for row in report["chains"]] == ["c001"]
    assert "make it again: evodsp data index --complexes true" in report["chains"][0]["reason"]
    assert report["stale"] == [f"alignment_dir {tmp_path}/alignments"]
    assert report["counts"]["read, unreadable"] == 1


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
    of_files = doctor(tmp_path)
    store = tmp_path / "store"
    build(BuildConfig(tmp_path / "alignments", tmp_path / "mmcif_files", store, complexes=True, workers=1))
    for name in ("alignments", "mmcif_files"):
        shutil.rmtree(tmp_path / name)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["data"]["store"] = str(store)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    code, found = doctor(tmp_path)
    assert code == of_files[0] == 0
    assert found["counts"].pop("without a record") == 0
    to_build = [name for name in of_files[1]["summary"] if name not in found["summary"]]
    assert [name.split()[0] for name in to_build] == ["size", "time"]  # a store need not be built of one
    for name in to_build:
        del of_files[1]["summary"][name]
    assert found == of_files[1]
