"""`evodsp search`, and a prediction that searches its alignments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.inference.groups import Groups
from evodsp.inference.predict import predict, predict_records
from evodsp.parallel.group import Group
from tests.builders.msa_server import StandIn, serving
from tests.builders.prediction import read_json, silent
from tests.ranks import RankPool

from .conftest import OTHER, QUERY, Workplace


def without_waits() -> AbstractContextManager[object]:
    """A client that asks again at once: the stand-in has an answer by then."""
    return mock.patch("evodsp.search.server._POLL_S", 0.01)


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    with without_waits():
        yield


def alignments_of(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(folder.iterdir())}


def test_a_prediction_searches_what_is_missing_once(workplace: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches sequences sent although they have alignments, a second request for the same, and a search that is not used."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>new\n{OTHER}\n>same\n{OTHER}\n")
    stand_in = StandIn()
    with serving(stand_in) as address:
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


def test_a_record_that_cannot_be_searched_is_a_failure(workplace: Workplace) -> None:
    """Catches a search that fails for one record and ends the run, or a prediction from the sequence alone without a word."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>new\n{OTHER}\n")
    stand_in = StandIn()
    stand_in.never = {OTHER}
    with serving(stand_in) as address:
        found = predict_records(workplace.change(msa_server=address, seeds=1), silent)
    assert [result.name for result in found.results] == ["alpha_A"]
    assert found.failures[0].name == "new"
    assert "could not search this sequence" in found.failures[0].reason


def test_nothing_is_sent_for_a_run_that_cannot_be(workplace: Workplace) -> None:
    """Catches sequences that are sent before the model is known to exist."""
    workplace.config.fasta.write_text(f">new\n{OTHER}\n")
    stand_in = StandIn()
    with serving(stand_in) as address:
        config = workplace.change(msa_server=address, checkpoint=workplace.root / "none.ckpt")
        with pytest.raises(UserError, match="no such checkpoint"):
            predict(config, silent)
    assert not stand_in.asked
    assert not config.output.exists()


def on_a_rank(handle: Any, config: Any) -> str:
    try:
        with without_waits():
            predict_records(config, silent, None, Groups(Group(handle), None))
    except UserError as error:
        return str(error)
    return "predicted"


def test_one_of_several_ranks_searches(workplace: Workplace, pool: RankPool) -> None:
    """Catches a search by every rank, and one of which the other ranks do not hear."""
    workplace.config.fasta.write_text(f">new\n{OTHER}\n")
    stand_in = StandIn()
    with serving(stand_in) as address:
        found = pool.run(2, on_a_rank, workplace.change(msa_server=address, seeds=1))
    assert found == ["predicted"] * 2
    assert len(stand_in.asked) == 1
    settings = read_json(workplace.config.output / "new" / "ranking.json")["settings"]
    assert settings["alignments"], "what was found is used"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a wrong exit code, a record of the wrong kind that ends the search, and output that prediction cannot take."""
    (tmp_path / "in.fasta").write_text(f">one\n{OTHER}\n>bad\nGST1\n>two\n{QUERY}\n")
    stand_in = StandIn()
    words = ["search", str(tmp_path / "in.fasta"), "--output", str(tmp_path / "found")]
    with serving(stand_in) as address:
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
