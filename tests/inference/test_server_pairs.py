"""Complexes whose rows a server pairs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.geometry.residues import decode
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.search import with_searched
from evodsp.inference.target_msas import ComplexMsa
from evodsp.inference.targets import find_targets
from evodsp.search.server import MsaServer
from tests.builders.msa_server import StandIn, serving
from tests.builders.prediction import read_json, silent

from .conftest import OTHER, QUERY
from .test_complexes import multimer, settings  # noqa: F401
from .test_search import without_waits

A, B = QUERY.replace("X", "A"), OTHER
TRIMER = f">x\n{B}:{A}:{B}\n"
PAIRED = 2
"""Rows of the stand-in for each sequence, besides the query."""


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def address(stand_in: StandIn) -> Iterator[str]:
    with without_waits(), serving(stand_in) as found:
        yield found


def test_a_complex_has_paired_and_other_rows(
    stand_in: StandIn,
    address: str,
    multimer: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
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


def test_a_server_that_only_searches(
    stand_in: StandIn,
    address: str,
    multimer: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
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


def test_a_wrong_answer_costs_the_complex(
    stand_in: StandIn,
    address: str,
    multimer: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Catches a complex that is predicted without pairs because an answer was cut off."""
    stand_in.pairs = f">101\n{B}\n>a\n{B}\n\0".encode()
    found = predict_records(settings(tmp_path, multimer, TRIMER + f">y\n{B}\n", msa_server=address), silent)
    assert [result.name for result in found.results] == ["y"]
    (failure,) = found.failures
    assert "--pairing none predicts it without paired rows" in failure.reason


@pytest.mark.parametrize(
    ("text", "options"),
    [(f">x\n{B}:{B}\n", {}), (TRIMER, {"pairing": "none"}), (TRIMER, {"pairing": "entry"})],
    ids=["copies", "none", "entry"],
)
def test_where_nothing_is_to_be_paired(
    stand_in: StandIn,
    address: str,
    multimer: Path,  # noqa: F811
    tmp_path: Path,
    text: str,
    options: dict[str, str],
) -> None:
    """Catches sequences that are sent for pairs nobody wants."""
    predict(settings(tmp_path, multimer, text, msa_server=address, **options), silent)
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
    stand_in: StandIn,
    address: str,
    multimer: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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
