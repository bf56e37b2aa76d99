"""Searches of alignments, pairs and templates on a server: `evodsp search`, and a prediction that searches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from evodsp.cli import main
from evodsp.data.records import ProteinSequence
from evodsp.errors import UserError
from evodsp.geometry.residues import decode
from evodsp.inference.groups import Groups
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.search import with_searched
from evodsp.inference.target_msas import ComplexMsa
from evodsp.inference.targets import Target, find_targets
from evodsp.parallel.group import Group
from evodsp.search.searcher import Found, NoAnswerError
from evodsp.search.server import MsaServer, NotPairedError
from tests.builders.msa_server import StandIn
from tests.builders.prediction import read_json, silent
from tests.builders.training_chains import write_chain
from tests.ranks import RankPool

from .conftest import OTHER, QUERY, Workplace, settings


def alignments_of(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(folder.iterdir())}


def test_a_prediction_searches_what_is_missing_once(
    workplace: Workplace, stand_in: StandIn, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches sequences sent although they have alignments, a second request for the same, and a search that is not used."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>new\n{OTHER}\n>same\n{OTHER}\n")
    config = workplace.change(msa_server=address, seeds=1)
    found = predict(config, silent)
    said = capfd.readouterr().err
    assert stand_in.asked == [[OTHER]]
    assert f"1 sequence will be sent to {address}, whose operator can read them; alignments" in said
    assert alignments_of(config.output / "_alignments").keys() == {"new", "same"}
    again: list[str] = []
    assert all(result.kept for result in predict(config, again.append))
    assert len(stand_in.asked) == 1
    by_name = {result.name: json.loads((result.folder / "timings.json").read_text()) for result in found}
    assert by_name["new"]["alignment_rows"] == 6
    assert any("kept in _alignments" in line for line in again)
    assert not any("predicted from its sequence alone" in line for line in again)


def test_a_record_that_cannot_be_searched_is_a_failure(workplace: Workplace, stand_in: StandIn, address: str) -> None:
    """Catches a search that fails for one record and ends the run, or a prediction from the sequence alone without a word."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>new\n{OTHER}\n")
    stand_in.never = {OTHER}
    found = predict_records(workplace.change(msa_server=address, seeds=1), silent)
    assert [result.name for result in found.results] == ["alpha_A"]
    assert found.failures[0].name == "new"
    assert "could not search this sequence" in found.failures[0].reason


def test_nothing_is_sent_for_a_run_that_cannot_be(workplace: Workplace, stand_in: StandIn, address: str) -> None:
    """Catches sequences that are sent before the model is known to exist."""
    workplace.config.fasta.write_text(f">new\n{OTHER}\n")
    config = workplace.change(msa_server=address, checkpoint=workplace.root / "none.ckpt")
    with pytest.raises(UserError, match="no such checkpoint"):
        predict(config, silent)
    assert not stand_in.asked
    assert not config.output.exists()


def on_a_rank(handle: Any, config: Any) -> str:
    try:
        with mock.patch("evodsp.search.server._POLL_S", 0.01):
            predict_records(config, silent, None, Groups(Group(handle), None))
    except UserError as error:
        return str(error)
    return "predicted"


def test_one_of_several_ranks_searches(workplace: Workplace, stand_in: StandIn, address: str, pool: RankPool) -> None:
    """Catches a search by every rank, and one of which the other ranks do not hear."""
    workplace.config.fasta.write_text(f">new\n{OTHER}\n")
    found = pool.run(2, on_a_rank, workplace.change(msa_server=address, seeds=1))
    assert found == ["predicted"] * 2
    assert len(stand_in.asked) == 1
    settings = read_json(workplace.config.output / "new" / "ranking.json")["settings"]
    assert settings["alignments"], "what was found is used"


def test_the_command(stand_in: StandIn, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a wrong exit code, a record of the wrong kind that ends the search, and output that prediction cannot take."""
    (tmp_path / "in.fasta").write_text(f">one\n{OTHER}\n>bad\nGST1\n>two\n{QUERY}\n")
    words = ["search", str(tmp_path / "in.fasta"), "--output", str(tmp_path / "found")]
    assert main([*words, "--msa_server", address]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"2 records have alignments in {tmp_path / 'found'}, 1 failed\n"
    assert "bad" in captured.err
    (tmp_path / "in.fasta").write_text(f">one\n{OTHER}\n>two\n{QUERY}\n")
    assert main([*words, "--msa_server", address]) == 0
    assert len(stand_in.asked) == 1
    assert alignments_of(tmp_path / "found") == {
        name: ["bfd.mgnify30.metaeuk30.smag30.a3m", "search.json", "uniref.a3m"] for name in ("one", "two")
    }
    assert main([*words, "--msa_server", "http://127.0.0.1:9", "--program", "mmseqs"]) == 2
    assert "both are given" in capsys.readouterr().err


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
    monkeypatch.setattr("evodsp.inference.search.MsaServer", Finding)
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


A, B = QUERY.replace("X", "A"), OTHER
TRIMER = f">x\n{B}:{A}:{B}\n"
PAIRED = 2
"""Rows of the stand-in for each sequence, besides the query."""


def test_a_complex_has_paired_and_other_rows(stand_in: StandIn, address: str, multimer: Path, tmp_path: Path) -> None:
    """Catches pairs that are not asked for, not used, or asked for again; and files that do not say how many there are."""
    said: list[str] = []
    config = settings(tmp_path, multimer, TRIMER, msa_server=address)
    (result,) = predict(config, said.append)
    assert stand_in.asked == [[B, A]]
    assert stand_in.paired == [[B, A]], "each sequence once, in the order of the chains"
    assert any(f"{PAIRED} of them paired" in line for line in said)
    assert read_json(result.folder / "timings.json")["paired_rows"] == PAIRED
    assert "No row of the alignments pairs" not in (result.folder / "report.html").read_text()
    (again,) = predict(config, silent)
    assert again.kept
    assert len(stand_in.asked) == len(stand_in.paired) == 1
    (target,), _ = find_targets([tmp_path / "given.fasta"], config.output / "_alignments")
    assert ComplexMsa.read(target).paired == PAIRED, "the folder serves as --alignments, too"


def test_rows_are_paired_as_the_server_says(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches row k of one sequence beside row k + 1 of another, and the copies of a chain with different rows."""
    stand_in.pairs = (
        f">101\n{B}\n>a\n{B[:-1]}W\n>b\n{B[:-1]}Y\n>c\n{'-' * len(B)}\n\0"
        f">102\n{A}\n>a\n{A[:-1]}W\n>b\n{A[:-1]}Y\n>c\n{A[:-1]}V\n\0"
    ).encode()
    (tmp_path / "x.fasta").write_text(TRIMER)
    assert main(["search", str(tmp_path / "x.fasta"), "--output", str(tmp_path / "kept"), "--msa_server", address]) == 0
    (target,), _ = find_targets([tmp_path / "x.fasta"], tmp_path / "kept")
    msa = ComplexMsa.read(target)
    rows = [decode(row) for row in msa.alignments[0].residues]
    assert rows[:3] == [B + A + B, *(B[:-1] + end + A[:-1] + end + B[:-1] + end for end in "WY")]
    assert msa.paired == PAIRED
    gaps = "-" * len(B)
    assert f"{gaps}{A[:-1]}-{gaps}" in rows[3:], "rows of one sequence stay"
    (without,), _ = find_targets([tmp_path / "x.fasta"], tmp_path / "kept", pairing="none")
    assert ComplexMsa.read(without).paired == 0
    assert without.digest != target.digest


def test_a_server_that_only_searches(stand_in: StandIn, address: str, multimer: Path, tmp_path: Path) -> None:
    """Catches a complex that is predicted without pairs and without a word, or not at all; and finished results that fail when
    the command runs again."""
    stand_in.pairs, said = 404, list[str]()
    config = settings(tmp_path, multimer, TRIMER, msa_server=address)
    (result,) = predict(config, said.append)
    assert sum("pairs no rows of different chains" in line for line in said) == 1
    assert "No row of the alignments pairs" in (result.folder / "report.html").read_text()
    stand_in.pairs = None
    assert predict(config, silent)[0].kept
    assert not stand_in.paired


def test_a_wrong_answer_costs_the_complex(stand_in: StandIn, address: str, multimer: Path, tmp_path: Path) -> None:
    """Catches a complex that is predicted without pairs because an answer was cut off."""
    stand_in.pairs = f">101\n{B}\n>a\n{B}\n\0".encode()
    found = predict_records(settings(tmp_path, multimer, TRIMER + f">y\n{B}\n", msa_server=address), silent)
    assert [result.name for result in found.results] == ["y"]
    (failure,) = found.failures
    assert "--pairing none predicts it without paired rows" in failure.reason


@pytest.mark.parametrize(("text", "pairing"), [(f">x\n{B}:{B}\n", "species"), (TRIMER, "none"), (TRIMER, "entry")])
def test_where_nothing_is_to_be_paired(
    stand_in: StandIn, address: str, tmp_path: Path, text: str, pairing: Any
) -> None:
    """Catches sequences that are sent for pairs nobody wants."""
    (tmp_path / "x.fasta").write_text(text)
    targets, _ = find_targets([tmp_path / "x.fasta"], None, pairing=pairing)
    with_searched(targets, tmp_path / "out", MsaServer(address))
    assert len(stand_in.asked) == 1
    assert not stand_in.paired


def test_the_sequences_of_own_alignments_are_not_sent(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches a chain whose alignment is the user's own and whose sequence is sent for pairs."""
    own = tmp_path / "own" / "x_B"
    own.mkdir(parents=True)
    (own / "x.a3m").write_text(f">q\n{A}\n")
    (tmp_path / "x.fasta").write_text(f">x\n{B}:{A}:GSTA\n")
    targets, _ = find_targets([tmp_path / "x.fasta"], tmp_path / "own")
    (target,), _ = with_searched(targets, tmp_path / "out", MsaServer(address))
    assert stand_in.asked == [[B, "GSTA"]]
    assert not stand_in.paired
    assert target.notes[-1].startswith(
        f"no paired rows are asked of {address}: sequences with alignments of your own (x_B)"
    )


def test_pairs_of_species_that_all_chains_have(
    stand_in: StandIn, address: str, multimer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an option that does not reach the server, and rows of the other mode that stand for it, in silence, before and
    after the complex is predicted."""
    stand_in.pairing = "paircomplete"
    config = settings(tmp_path, multimer, TRIMER, msa_server=address, msa_server_pairing="complete")
    predict(config, silent)
    assert stand_in.paired == [[B, A]]
    assert predict(config, silent)[0].kept
    with pytest.raises(
        UserError, match=r"x_paired holds rows of the server's mode 'paircomplete', .* asks for pairgreedy;"
    ):
        predict(replace(config, msa_server_pairing="greedy"), silent)
    words = ["search", str(tmp_path / "given.fasta"), "--output", str(config.output / "_alignments")]
    assert main([*words, "--msa_server", address]) == 1
    assert "asks for pairgreedy; remove that folder" in capsys.readouterr().err
    assert main([*words, "--msa_server", address, "--msa_server_pairing", "complete"]) == 0
    assert main([*words, "--program", "mmseqs", "--database", "x", "--msa_server_pairing", "complete"]) == 2
    assert "--msa_server_pairing is given without --msa_server" in capsys.readouterr().err
    assert len(stand_in.paired) == 1


def test_pairs_of_other_sequences(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches paired rows of an earlier complex of the same name."""
    (tmp_path / "x.fasta").write_text(TRIMER)
    kept = tmp_path / "kept"
    assert main(["search", str(tmp_path / "x.fasta"), "--output", str(kept), "--msa_server", address]) == 0
    for chains, words in ((f"{B}:{A}:GSTA", "paired rows of sequences of 10, 22 residues"), (f"{A}:{B}", "of 10, 22")):
        shutil.rmtree(kept / "x_A", ignore_errors=True)
        shutil.rmtree(kept / "x_B", ignore_errors=True)
        (tmp_path / "x.fasta").write_text(f">x\n{chains}\n")
        (target,), _ = find_targets([tmp_path / "x.fasta"], kept)
        with pytest.raises(UserError, match=words):
            ComplexMsa.read(target)


HITS = {A: "1abc_A:1e-3 2abc_A:1E-9 9xyz_B:2e-12 7bad_C:1e-5", B: "3ABC_B:0.1"}


@pytest.fixture
def server(stand_in: StandIn, tmp_path: Path) -> StandIn:
    """A server with templates of both sequences: one without a structure, one that is broken; and files nobody asked for."""
    chains = {"1abc_A": (A[2:-1], 2001), "2abc_A": (A[4:], 2021), "3abc_B": (B[:4] + "A" + B[5:], 2011)}
    for key, (letters, year) in chains.items():
        write_chain(tmp_path / "pdb", key, letters, date(year, 1, 1))
    files = {path.name: path.read_bytes() for path in (tmp_path / "pdb" / "mmcif_files").iterdir()}
    stand_in.hits = HITS
    evil = {
        "../../3abc.cif/../2abc.cif": b"",
        "/tmp/0abc.cif": b"",
        "pdb70_a3m.ffdata": b"x",
        "7bad.cif": b"data_x\nloop_",
    }
    stand_in.structures = {**evil, **files}
    return stand_in


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "pdb").mkdir()


def test_each_chain_has_the_servers_templates(server: StandIn, address: str, multimer: Path, tmp_path: Path) -> None:
    """Catches templates of another chain, in the order of the table, of files that were not asked for, or that cost the record
    because one is broken; a log and a page without them; and a second run that asks again or has other ones."""
    said: list[str] = []
    config = settings(tmp_path, multimer, TRIMER, msa_server=address, msa_server_templates=True)
    (result,) = predict(config, said.append)
    assert server.templates == ["3ABC_B", "9xyz_B,2abc_A,7bad_C,1abc_A"]
    made = read_json(result.folder / "ranking.json")["settings"]
    assert made["templates"] == ["A:3ABC_B", "B:2abc_A", "B:1abc_A"]
    lines = [line.strip() for line in said if "templates of" in line]
    assert lines[0] == (
        f"templates of x_A: 1 template of 1 hit; the best 1 are used: 3ABC_B; hits and structures by {address}"
    )
    assert lines[1].startswith(
        "templates of x_B: 2 templates of 4 hits; 2 hits: no structure (9xyz_B, 7bad_C); the best 2 "
    )
    page = (result.folder / "report.html").read_text()
    assert "templates found by the server" in page
    kept = config.output / "_alignments" / "x_B"
    assert sorted(path.name for path in (kept / "templates").iterdir()) == ["1abc.cif", "2abc.cif", "7bad.cif"]
    assert (kept / "templates" / "2abc.cif").read_bytes() == (tmp_path / "pdb/mmcif_files/2abc.cif").read_bytes()
    before = {path: path.read_bytes() for path in result.folder.glob("seed_0*")}
    (more,) = predict(replace(config, seeds=2), silent)
    assert len(more.mean_plddt) == 2
    assert before == {path: path.read_bytes() for path in before}
    assert (len(server.asked), len(server.templates)) == (1, 2)
    with pytest.raises(UserError, match=r"another run \(templates: .* there, \[\] now"):
        predict(replace(config, msa_server_templates=False), silent)


def test_a_latest_date_of_the_servers_templates(server: StandIn, address: str, multimer: Path, tmp_path: Path) -> None:
    """Catches a date that does not limit what the server has found, and a hit left out because the record has its name."""
    said: list[str] = []
    config = settings(tmp_path, multimer, f">1abc_A\n{A}\n", msa_server=address, msa_server_templates=True)
    (result,) = predict(replace(config, max_template_date="2011-01-01"), said.append)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == ["1abc_A"]
    assert any("1 hit: released too late (2abc_A)" in line for line in said)


@pytest.mark.parametrize("answer", [404, {"1abc.cif": b""}], ids=["none", "empty"])
def test_a_server_without_structures_costs_no_record(
    server: StandIn,
    address: str,
    multimer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    answer: int | dict[str, bytes],
) -> None:
    """Catches a record that fails for its templates, in silence or when it is predicted again with others."""
    structures, server.structures = server.structures, answer
    config = settings(tmp_path, multimer, f">x\n{A}\n", msa_server=address, msa_server_templates=True)
    (result,) = predict(config, silent)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == []
    assert ("x gets no templates: " in capsys.readouterr().err) == (answer == 404)
    assert "templates found by the server" not in (result.folder / "report.html").read_text()
    server.structures = structures
    assert predict(config, silent)[0].kept
    assert len(server.templates) == 1
    with pytest.raises(UserError, match=r"another run \(templates_from: server there, None now"):
        predict(replace(config, msa_server_templates=False), silent)


def test_templates_are_found_on_a_machine_with_a_network_and_used_on_another(
    server: StandIn, address: str, multimer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a search whose structures a prediction without the server does not find, and hits that are lost where the
    structures are fetched later."""
    config = settings(tmp_path, multimer, TRIMER, alignments=tmp_path / "kept", msa_server_templates=True)
    words = ["search", str(tmp_path / "given.fasta"), "--output", str(tmp_path / "kept"), "--msa_server", address]
    assert main(words) == 0
    said: list[str] = []
    (result,) = predict(config, said.append)
    assert any("templates of x_B: none; structures of 4 hits have not been fetched" in line for line in said)
    assert main([*words, "--msa_server_templates", "true"]) == 0
    assert len(server.asked) == 1
    (result,) = predict(replace(config, overwrite=True), silent)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == ["A:3ABC_B", "B:2abc_A", "B:1abc_A"]
    assert main(["predict", "x.fasta", "--checkpoint", "x", "--output", "y", "--msa_server_templates", "true"]) == 2
    assert "--msa_server_templates is given without --msa_server; add" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--msa_server_templates is given beside --templates x; leave"):
        replace(config, templates=Path("x"))
