"""Records that ended the process that computed them (`evodsp.inference.devices`). Real ranks: test_parallel_predict.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evodsp.errors import UserError
from evodsp.inference import predict as module
from evodsp.inference.devices import AttemptNotes
from evodsp.inference.predict import predict_records
from evodsp.inference.results import RecordFailure
from tests.builders.prediction import silent

from .conftest import Workplace


class Killed(Exception):
    """Stands for what ends a process without a word."""


@pytest.fixture
def at_alpha(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    """Has alpha_A end with an error. None: it is predicted."""
    real, error = module.predict_seeds, list[BaseException | None]([None])

    def seeds(job: Any, *rest: Any) -> Iterator[Any]:
        if job.target.query.name == "alpha_A" and error[0] is not None:
            raise error[0]
        return real(job, *rest)

    monkeypatch.setattr(module, "predict_seeds", seeds)
    return lambda planted: error.__setitem__(0, planted)


def note(workplace: Workplace) -> Path:
    return workplace.config.output / ".alpha_A.begun"


def notes(workplace: Workplace) -> AttemptNotes:
    return AttemptNotes(workplace.config.output, workplace.config.memory_options)


def killed(workplace: Workplace, at_alpha: Callable[[BaseException | None], None], times: int, **change: Any) -> None:
    at_alpha(Killed())
    for _ in range(times):
        with pytest.raises(Killed):
            predict_records(workplace.change(seeds=1, **change), silent)


def test_a_record_that_ended_two_starts_is_left_out(workplace: Workplace, at_alpha: Any) -> None:
    """Catches a record that is begun for ever; one that is given up for other reasons, or for options that it was not tried
    with; a way out that leads nowhere; and a note that stays."""
    killed(workplace, at_alpha, times=1)
    at_alpha(None)
    assert [result.name for result in predict_records(workplace.change(seeds=1), silent).results] == [
        "alpha_A",
        "beta_A",
    ]
    assert not note(workplace).exists()

    again = {"output": workplace.root / "again"}
    killed(workplace, at_alpha, 2, **again)
    left = workplace.root / "again" / ".alpha_A.begun"
    for _ in range(2):
        outcome = predict_records(workplace.change(seeds=1, **again), silent)
        assert [result.name for result in outcome.results] == ["beta_A"]
        (failure,) = outcome.failures
        assert failure.reason.startswith(
            "alpha_A: left out, because 2 runs ended while they computed it, probably for want of"
        )
        assert failure.reason.endswith(f"; or delete {left} to try it again")
    at_alpha(None)
    assert not predict_records(workplace.change(seeds=1, working_memory="64MiB", **again), silent).failures
    assert not left.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("the disk is full")])
def test_an_end_that_is_no_record_s_fault_leaves_no_note(
    workplace: Workplace, at_alpha: Any, error: BaseException
) -> None:
    """Catches Ctrl-C that counts against the record, and a folder that is left though nothing was written."""
    before = workplace.snapshot()
    at_alpha(error)
    with pytest.raises(type(error)):
        predict_records(workplace.change(seeds=1), silent)
    assert workplace.snapshot() == before


def test_what_is_finished_speaks_for_a_record(workplace: Workplace) -> None:
    """Catches a record of many seeds that is left out because jobs ended in it, each some seeds further."""

    def some_seeds() -> None:
        with notes(workplace).noted("alpha_A", None) as left_out:
            assert left_out is None
            notes(workplace).note_progress("alpha_A")
            raise Killed

    for _ in range(4):
        with pytest.raises(Killed):
            some_seeds()


def test_a_reason_that_is_known_counts_at_once(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a record that ends one more start though a rank has said why it cannot be."""
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        notes(workplace).give_up(RecordFailure("alpha_A", "alpha_A: too long"), "the same command without --overwrite")
    said = capsys.readouterr().err
    assert said.startswith("evodsp: error: alpha_A: too long. The other ranks wait")
    assert "the same command without --overwrite leaves this record out" in said
    with notes(workplace).noted("alpha_A", None) as left_out:
        assert left_out == RecordFailure("alpha_A", f"alpha_A: too long; or delete {note(workplace)} to try it again")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"options": OPTIONS, "reason": null, "starts": Infinity}']
)
def test_a_note_that_cannot_be_read_is_one_start(workplace: Workplace, content: str) -> None:
    """Catches a traceback behind a full disk or somebody's own file."""
    note(workplace).parent.mkdir(parents=True)
    note(workplace).write_text(content.replace("OPTIONS", json.dumps(notes(workplace).options)))
    with notes(workplace).noted("alpha_A", None) as left_out:
        assert left_out is None
        assert json.loads(note(workplace).read_text())["starts"] == 2
