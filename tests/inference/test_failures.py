"""Records that cannot be predicted, or that ended the process that computed them: they are named, and the others go on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.errors import UserError
from evodsp.inference import predict as module
from evodsp.inference import seeds
from evodsp.inference.devices import AttemptNotes
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.results import RecordFailure, page_problem
from evodsp.inference.targets import Target
from tests.builders.prediction import read_json, silent

from .conftest import OTHER, QUERY, Finished, Workplace, write_alignment


@pytest.fixture
def workplace(workplace: Workplace) -> Workplace:
    """One seed shows what fails."""
    return Workplace(workplace.root, workplace.change(seeds=1))


def _empty(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\n")
    return workplace.config


OF_OURS = ("failures.json", "index.html", "index_evodsp.html", "predictions.csv", "predict.log", "_alignments")
BROKEN = {
    "alpha_A": (OTHER, r"targets\.fasta:3.*alpha_A"),
    "empty": ("", r"targets\.fasta:5: sequence 'empty' is empty"),
    "letters": ("GST1!", r"targets\.fasta:7: illegal letter '1' at position \d+ of sequence 'letters'"),
    "unknown": ("X" * 10, r"unknown: all 10 residues are X"),
    "no_file": (OTHER, r"no_file"),
    "differs": (f"{OTHER[:4]}W{OTHER[5:]}", r"differs/uniref90_hits\.a3m.*(position|residue) 5"),
    "longer": (f"{OTHER}AA", r"10 .*12|12 .*10"),
    "cut": (OTHER, r"cut/uniref90_hits\.a3m:\d+"),
    "long": (OTHER * 10_000, r"long: 100,000 residues do not fit; the pair representation alone takes"),
    **{
        name: (OTHER, rf"^the name '{re.escape(name)}' is that of a file or folder of evodsp's own") for name in OF_OURS
    },
}
"""Records that have an alignment of OTHER, but for `no_file`, `cut` and `long`: letters, and why they are not predicted."""


def test_broken_records_are_named_and_the_others_go_on(workplace):
    """Catches one bad record of many that ends the run, or that is lost without a word; and a folder of results where the run
    writes its own file."""
    config = workplace.config
    records = [("alpha_A", QUERY), *((name, letters) for name, (letters, _) in BROKEN.items()), ("beta_A", OTHER)]
    config.fasta.write_text("".join(f">{name}\n{letters}\n".replace("\n\n", "\n") for name, letters in records))
    for name in ("differs", "longer", "cut", "no_file"):
        write_alignment(config.alignments / name, OTHER)
    (config.alignments / "no_file" / "uniref90_hits.a3m").rename(config.alignments / "no_file" / "hits.txt")
    cut = config.alignments / "cut" / "uniref90_hits.a3m"
    cut.write_text(cut.read_text()[:-5])
    write_alignment(config.alignments / "long", BROKEN["long"][0], rows=1)
    lines: list[str] = []
    found = predict_records(config, lines.append)
    assert [result.name for result in found.results] == ["alpha_A", "beta_A"]
    reasons = {failure.name: failure.reason for failure in found.failures}
    assert reasons.keys() == BROKEN.keys()
    for name, (_, words) in BROKEN.items():
        assert re.search(words, reasons[name]), reasons[name]
        assert f"failed: {reasons[name]}" in lines
    assert lines[-1].startswith(f"2 done, 0 kept, {len(BROKEN)} failed; reasons in ")
    listed = read_json(config.output / "failures.json")["failures"]
    assert listed == [{"name": failure.name, "reason": failure.reason} for failure in found.failures]
    assert {path.name for path in config.output.iterdir()} == {
        *("alpha_A", "beta_A", "failures.json", "index.html", "predictions.csv"),
    }


@pytest.mark.parametrize("page", ["write_target_page", "write_batch_page"])
def test_a_page_that_cannot_be_written_costs_no_result(workplace, monkeypatch, page):
    """Catches a defect of the pages that ends the run, or that hides itself; the next run writes the page."""
    with monkeypatch.context() as broken:
        broken.setattr(f"evodsp.inference.predict.{page}", lambda *_: [][1])
        lines: list[str] = []
        found = predict_records(workplace.config, lines.append)
    assert found.line == "2 done, 0 kept, 0 failed"
    (name,) = {
        line.split(" could not be written")[0].split("/")[-1] for line in lines if "could not be written" in line
    }
    assert name == {"write_target_page": "report.html", "write_batch_page": "index.html"}[page]
    assert any("IndexError in test_failures.py, line " in line for line in lines)
    folders = [workplace.config.output / result.name for result in found.results]
    assert all((folder / "seed_0.cif").is_file() for folder in folders)
    again: list[str] = []
    predict(workplace.config, again.append)
    assert all((folder / "report.html").is_file() for folder in folders)
    assert (workplace.config.output / "index.html").is_file()
    assert not any("model, " in line for line in again), "predicted again for the sake of a page"


def test_a_page_on_a_full_disk_is_a_plain_line():
    """Catches names of our functions in the line that says that a disk is full."""

    def make() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    line = page_problem("x/report.html", make)
    assert line == "x/report.html could not be written (No space left on device); the results themselves are complete"


def test_a_users_own_index_page_and_table_stay(workplace):
    """Catches an index.html, or a predictions.csv such as the input, that is overwritten although evodsp has not written it."""
    output = workplace.config.output
    output.mkdir(parents=True)
    own = {"index.html": "<p>mine</p>", "predictions.csv": "id,sequence\n"}
    for name, text in own.items():
        (output / name).write_text(text)
    lines: list[str] = []
    predict(workplace.config, lines.append)
    assert {name: (output / name).read_text() for name in own} == own
    assert "2 targets" in (output / "index_evodsp.html").read_text()
    assert (output / "predictions_evodsp.csv").read_text().count("alpha_A,") == 1
    assert f"to look at: {output / 'index_evodsp.html'}" in lines


def test_failures_of_an_earlier_run_are_forgotten(workplace, finished: Finished):
    """Catches a list of failures that stays when the record has been mended."""
    whole = workplace.config.fasta.read_text()
    config = _empty(workplace)
    shutil.rmtree(config.output / "beta_A")
    predict(config, silent)
    assert (config.output / "failures.json").exists()
    workplace.config.fasta.write_text(whole)
    found = predict_records(config, silent)
    assert [result.kept for result in found.results] == [True, False]
    assert found.line == "1 done, 1 kept, 0 failed"
    assert not (config.output / "failures.json").exists()


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ((seeds, "run_passes"), MemoryError(), "do not fit into the memory of this machine.*--working_memory"),
        (
            (seeds, "run_passes"),
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
            "do not fit into the memory of this machine.*--working_memory",
        ),
        (
            (seeds, "run_passes"),
            torch.OutOfMemoryError("CUDA out of memory"),
            "do not fit into the memory of this GPU.*--working_memory.*--device cpu",
        ),
        ((seeds, "structure_of"), MemoryError(), "do not fit"),
        ((module, "write_results"), MemoryError(), "do not fit"),
        ((Target, "read"), MemoryError(), "do not fit"),
        ((seeds, "structure_of"), None, "residue 4.*checkpoint"),
    ],
    ids=["python", "cpu", "gpu", "confidences", "files", "alignments", "diverged"],
)
def test_what_fails_with_one_record_costs_one_record(workplace, monkeypatch, where, error, words):
    """Catches a target that is too large for the memory, in the passes, for confidences (which gather residues squared
    numbers), as text of its files or for its deep alignments, that ends the run; and a diverged one that does so, or that is
    written."""
    owner, name = where
    real = getattr(owner, name)

    def fails(*given: Any) -> Any:
        names = [value.query.name for value in given if isinstance(value, Target)]
        shapes = [value["aatype"].shape[-1] for value in given if isinstance(value, dict) and "aatype" in value]
        ours = "alpha_A" in [*names, *(value for value in given if isinstance(value, str))] or len(QUERY) in shapes
        if ours and error is not None:
            raise error
        found = real(*given)
        if ours:
            found.positions[3] = float("nan")
        return found

    monkeypatch.setattr(owner, name, fails)
    found = predict_records(workplace.config, silent)
    assert [result.name for result in found.results] == ["beta_A"]
    assert re.search(f"alpha_A: .*{words}", found.failures[0].reason)
    assert {path.name for path in workplace.config.output.iterdir()} == {
        *("beta_A", "failures.json", "index.html", "predictions.csv"),
    }


def test_a_run_that_is_interrupted_goes_on(workplace, monkeypatch):
    """Catches a half-written target after Ctrl-C, and a next run that repeats finished targets."""
    real = module._predict_target

    def stop_at_beta(job, *rest):
        if job.target.query.name == "beta_A":
            raise KeyboardInterrupt
        return real(job, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_predict_target", stop_at_beta)
        with pytest.raises(KeyboardInterrupt):
            predict(workplace.config, silent)
    assert [path.name for path in workplace.config.output.iterdir()] == ["alpha_A"]
    assert [result.kept for result in predict(workplace.config, silent)] == [True, False]


def test_an_error_of_the_program_is_not_a_record(workplace, monkeypatch):
    """Catches a bug that is reported as a mistake of the user."""
    monkeypatch.setattr(seeds, "run_passes", lambda *_: (_ for _ in ()).throw(RuntimeError("sizes do not match")))
    with pytest.raises(RuntimeError, match="sizes do not match"):
        predict(workplace.config, silent)


def test_a_name_that_stands_twice_keeps_the_first(workplace):
    """Catches a page and a table without the record that was predicted, because another of its name failed."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>alpha_A\n{OTHER}\n")
    found = predict_records(workplace.config, silent)
    assert [(result.name, found.failures[0].name) for result in found.results] == [("alpha_A", "alpha_A")]
    table = (workplace.config.output / "predictions.csv").read_text()
    assert [line.split(",")[0] for line in table.splitlines()] == ["target", "alpha_A"]
    assert "alpha_A/report.html" in (workplace.config.output / "index.html").read_text()


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
    "content", ["", "[]", "[" * 100_000, '{"options": OPTIONS, "reason": null, "starts": Infinity}']
)
def test_a_note_that_cannot_be_read_is_one_start(workplace: Workplace, content: str) -> None:
    """Catches a traceback behind a full disk or somebody's own file."""
    note(workplace).parent.mkdir(parents=True)
    note(workplace).write_text(content.replace("OPTIONS", json.dumps(notes(workplace).options)))
    with notes(workplace).noted("alpha_A", None) as left_out:
        assert left_out is None
        assert json.loads(note(workplace).read_text())["starts"] == 2
