"""Records whose alignments a server does not find."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.data.records import ProteinSequence
from evodsp.inference import search
from evodsp.inference.search import with_searched
from evodsp.inference.targets import Target, find_targets
from evodsp.search.searcher import Found, NoAnswerError
from evodsp.search.server import MsaServer, NotPairedError


class Dying(MsaServer):
    """Finds alignments of one sequence, and is gone."""

    most = 1

    def search(self, sequences: Sequence[str], say: object) -> list[Found]:  # type: ignore[override]
        if sequences != ["GST"]:
            raise NoAnswerError("http://host: gone")
        return [Found({"x.a3m": b">q\nGST\n"})]


def test_a_server_that_is_gone_costs_only_what_it_would_have_found(tmp_path: Path) -> None:
    """Catches records that have alignments, and those found before, which are not predicted because a server is down."""
    (tmp_path / "own.a3m").write_text(">q\nMKT\n")
    records = {"own": "MKT", "found": "GST", "lost": "AAA", "lost_too": "CCC"}
    targets = [
        Target(ProteinSequence(name, letters), tmp_path / "own.a3m" if name == "own" else None, ("none",))
        for name, letters in records.items()
    ]
    usable, failures = with_searched(targets, tmp_path, Dying("http://host"))
    assert [target.query.name for target in usable] == ["own", "found"]
    assert usable[1].alignments == tmp_path / "_alignments" / "found"
    assert [(failure.name, failure.reason) for failure in failures] == [
        ("lost", "http://host: gone"), ("lost_too", "http://host: gone"),
    ]  # fmt: skip


class Finding(MsaServer):
    """Finds alignments of each sequence, and remembers which it was asked for."""

    most, asked = 10, list[str]()

    def search(self, sequences: Sequence[str], say: object) -> list[Found]:  # type: ignore[override]
        self.asked.extend(sequences)
        return [Found({"x.a3m": f">q\n{letters}\n".encode()}) for letters in sequences]

    def keep_pairs(self, sequences: Sequence[str], folder: Path, say: object) -> None:
        raise NotPairedError("http://host pairs no rows")


def test_chains_of_a_complex_are_searched_alone(tmp_path: Path) -> None:
    """Catches chains that are searched as one sequence, copies that are searched twice, and found rows that are not read."""
    (tmp_path / "x.fasta").write_text(">x\nMKT:GST:MKT:AAA\n")
    write = tmp_path / "given" / "x_D"
    write.mkdir(parents=True)
    (write / "x.a3m").write_text(">q\nAAA\n")
    targets, _ = find_targets([tmp_path / "x.fasta"], tmp_path / "given")
    (target,), failures = with_searched(targets, tmp_path, Finding("http://host"))
    assert not failures
    assert sorted(Finding.asked) == ["GST", "MKT"]
    found = tmp_path / "_alignments"
    assert [chain.alignments for chain in target.chains] == [found / "x_A", found / "x_B", None, write]
    assert target.alignments is None
    assert target.notes[0].startswith("alignments of a server's search")


def test_a_chain_with_the_name_of_its_complex(tmp_path: Path) -> None:
    """Catches the alignments of a chain that are taken for one of the whole complex, because the file has its name."""
    (tmp_path / "a.fasta").write_text(">a\nMKT\n>b\nGST\n")
    targets, _ = find_targets([tmp_path / "a.fasta"], None, one_complex=True)
    (target,), failures = with_searched(targets, tmp_path, Finding("http://host"))
    found = tmp_path / "_alignments"
    assert not failures
    assert target.alignments is None
    assert [chain.alignments for chain in target.chains] == [found / "a", found / "b"]


def test_the_command_of_a_search_says_that_the_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an exit code that looks like a few records without alignments, and the same line for each of thousands."""
    monkeypatch.setattr("evodsp.inference.search.MsaServer", Dying)
    (tmp_path / "in.fasta").write_text(">a\nGST\n" + "".join(f">b{number}\nMKT{'A' * number}\n" for number in range(5)))
    words = [
        "search",
        str(tmp_path / "in.fasta"),
        "--output",
        str(tmp_path / "out"),
        "--msa_server",
        "http://me:secret@host",
    ]
    assert main([*words, "--msa_server_limits.answer_s", "5"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("gone") == 1
    assert "secret" not in captured.err + captured.out
    assert (tmp_path / "out" / "a" / "x.a3m").is_file()
    assert main([*words, "--msa_server_limits.answer_s", "0"]) == 2
    assert "--msa_server_limits.answer_s is 0" in capsys.readouterr().err


def test_alignments_under_a_header_are_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches alignments that an earlier search called sp|P61823|RNAS1_BOVIN and that are searched again, or not read, for
    P61823; and a record that two headers may stand for, searched as if it had none."""
    monkeypatch.setattr(search, "MsaServer", Finding)
    Finding.asked.clear()
    headers = {"sp|P61823|RNAS1_BOVIN": "MKT", "sp|P00698|LYSC_CHICK": "GST", "new": "AAA"}
    (tmp_path / "in.fasta").write_text("".join(f">{header}\n{letters}\n" for header, letters in headers.items()))
    kept = tmp_path / "_alignments"
    for name, letters in (("sp|P61823|RNAS1_BOVIN", "MKT"), ("sp|P00698|X", "GST"), ("tr|P00698|Y", "GST")):
        (kept / name).mkdir(parents=True)
        (kept / name / "x.a3m").write_text(f">q\n{letters}\n")
    words = ["search", str(tmp_path / "in.fasta"), "--output", str(kept), "--msa_server", "http://host"]
    assert main(words) == 1
    assert Finding.asked == ["AAA"]
    said = capsys.readouterr()
    assert (
        f"1 record is not searched: {kept} has alignments by headers of databases, such as sp|P61823|RNAS1" in said.err
    )
    assert "sp|P00698|X and tr|P00698|Y may both be those of 'P00698'" in said.err
    assert said.out == f"2 records have alignments in {kept}, 1 failed\n"
    targets, _ = find_targets([tmp_path / "in.fasta"], None)
    usable, (failure,) = with_searched(targets, tmp_path, Finding("http://host"))
    assert [target.alignments for target in usable] == [kept / "sp|P61823|RNAS1_BOVIN", kept / "new"]
    assert (failure.name, Finding.asked) == ("P00698", ["AAA"])


def test_what_was_predicted_without_relatives_is_asked_for_only_with_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a batch that goes on after a day and whose finished records fail, because their alignments have changed."""
    monkeypatch.setattr("evodsp.search.searcher.ASKED_AGAIN_S", -1.0)
    (tmp_path / "in.fasta").write_text(">a\nMKT\n>b\nGST\n")
    targets, _ = find_targets([tmp_path / "in.fasta"], None)
    with_searched(targets, tmp_path, Finding("http://host"))
    (tmp_path / "a").mkdir()
    for retry, asked in ((False, ["GST"]), (True, ["GST", "MKT"])):
        Finding.asked.clear()
        with_searched(targets, tmp_path, Finding("http://host"), retry)
        assert sorted(Finding.asked) == asked
    assert "no related sequence was found for 2 records (a, b)" in capsys.readouterr().err
