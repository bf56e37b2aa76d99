"""What the training, validation and test chains of a run have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evodsp.cli import main
from evodsp.data.doctor.examination import ALIGNED_WITH, Overlap, overlap
from evodsp.data.similarity.sequences import SHORTEST, Words, identity
from tests.builders.random_sequences import changed, random_sequences
from tests.builders.training_chains import TINY, write_chain

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
def folder(tmp_path: Path) -> Path:
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
def test_the_doctor_reports_leaks(folder: Path, capsys: pytest.CaptureFixture[str], indexed: bool) -> None:
    """Catches `data.test_chains` that nobody reads, chains of training that are not compared because they are not read, and
    a report that says so in one place only."""
    options = ["--config", str(folder / "config.yaml"), "--output", str(folder / "doctor"), "--workers=0", "--sample=1"]
    if indexed:
        roots = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
        assert main(["data", "index", *roots, "--output", str(folder / "index"), "--workers=0"]) == 0
        options += ["--index", str(folder / "index")]
    assert main(["data", "doctor", *options]) == 0
    out = capsys.readouterr().out
    report = json.loads((folder / "doctor" / "doctor.json").read_text())
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
    page = (folder / "doctor" / "doctor.html").read_text()
    assert "Training, validation and test" in page
    for text in (out, page):
        assert "as a share of the shorter sequence" in text
        assert "whose sequence 2abc_A has" in text


def test_the_doctor_takes_the_options_of_a_run(folder: Path) -> None:
    """Catches a data set of one's own that cannot be examined as it is trained on, held-out chains among the training chains,
    and relatives of them that the doctor still counts."""
    words = ["data", "doctor", f"--alignment_dir={folder}/alignments", f"--structure_dir={folder}/mmcif_files"]
    words += [
        f"--output={folder}/doctor",
        "--workers=0",
        "--validation_chains",
        "[1abc_A]",
        "--test_chains",
        "[5abc_A]",
    ]

    def examined(*options: str) -> dict[str, Any]:
        assert main([*words, *options]) == 0
        found: dict[str, Any] = json.loads((folder / "doctor" / "doctor.json").read_text())
        return found

    report = examined()
    assert report["summary"]["training chains that can be used"] == "3 of 3"
    assert report["counts"]["of validation or test, left out"] == 2
    assert [part["chains"] for part in report["overlaps"]] == [[], [], []]
    (folder / "held_out.txt").write_text("1abc_A\n5abc_A\n")
    report = examined("--exclude_like", str(folder / "held_out.txt"), "--exclude_identity", "0.8")
    assert report["left_out"] == {"alike those of data.exclude_like (more than 80% identical)": 1}
    assert {near["first"] for part in report["overlaps"] for near in part["nearest"]} <= {"2abc_A", "4abc_A", "1abc_A"}
    assert main([*words, "--exclude_identity", "0.8"]) == 2, "an identity, and nothing that is excluded by it"


def test_test_chains_are_read_as_validation_chains_are(folder: Path) -> None:
    """Catches test chains without files, which `evodsp test` finds after the training."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    content["data"]["test_chains"] = ["4abc_A", "9abc_A", "5abc_A"]
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    (folder / "alignments" / "5abc_A" / "uniref90_hits.a3m").write_text(">q\nWWW\n")
    options = ["--config", str(folder / "config.yaml"), "--output", str(folder / "doctor"), "--workers=0"]
    assert main(["data", "doctor", *options]) == 1
    report = json.loads((folder / "doctor" / "doctor.json").read_text())
    assert report["obstacles"] == ["1 test chains are missing", "1 test chains are bad"]
    states = {row["chain"]: row["state"] for row in report["chains"]}
    assert states == {"9abc_A": "test chain missing", "5abc_A": "test chain mismatching"}
    (part,) = [part for part in report["overlaps"] if part["sets"] == ["training", "test"]]
    assert part["unknown"] == 1, "the chain that is missing"
