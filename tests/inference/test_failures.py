"""Records that cannot be predicted: they are named, the others go on, and nothing of them is left behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
from typing import Any

import pytest
import torch

from evodsp.inference import command, seeds
from evodsp.inference import predict as predicting
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.results import page_problem
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


def test_a_users_own_index_page_stays(workplace):
    """Catches an index.html in the output folder that is overwritten although evodsp has not written it."""
    workplace.config.output.mkdir(parents=True)
    own = workplace.config.output / "index.html"
    own.write_text("<p>mine</p>")
    lines: list[str] = []
    predict(workplace.config, lines.append)
    assert own.read_text() == "<p>mine</p>"
    ours = workplace.config.output / "index_evodsp.html"
    assert "2 targets" in ours.read_text()
    assert f"to look at: {ours}" in lines


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
    ("error", "words"),
    [
        (MemoryError(), "memory of this machine"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
            "this machine",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory of this GPU.*--device cpu"),
    ],
    ids=["python", "cpu", "gpu"],
)
def test_the_end_of_memory_is_one_record(workplace, monkeypatch, error, words):
    """Catches a target that is too large for the memory and takes the targets behind it along."""
    real = seeds.run_passes

    def full(model: Any, batch: dict[str, torch.Tensor], *given: Any) -> Any:
        if batch["aatype"].shape[-1] == len(QUERY):
            raise error
        return real(model, batch, *given)

    monkeypatch.setattr(seeds, "run_passes", full)
    found = predict_records(workplace.config, silent)
    assert [result.name for result in found.results] == ["beta_A"]
    assert re.search(rf"alpha_A: 22 residues do not fit into the {words}|{words}", found.failures[0].reason)
    assert "--working_memory" in found.failures[0].reason


@pytest.mark.parametrize("where", ["structure_of", "write_results", "read"])
def test_memory_that_ends_outside_of_the_passes_is_one_record(workplace, monkeypatch, where):
    """Catches confidences, which gather residues squared numbers, files that hold them as text, and deep alignments, that end
    the run where they do not fit."""
    owner = {"structure_of": seeds, "write_results": predicting, "read": Target}[where]
    real = getattr(owner, where)

    def full(*given: Any) -> Any:
        names = [value.query.name for value in given if isinstance(value, Target)]
        if "alpha_A" in [*names, *given]:
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(owner, where, full)
    found = predict_records(workplace.config, silent)
    assert [result.name for result in found.results] == ["beta_A"]
    assert "alpha_A: 22 residues do not fit" in found.failures[0].reason
    assert {path.name for path in workplace.config.output.iterdir()} == {
        "beta_A",
        "failures.json",
        "index.html",
        "predictions.csv",
    }


def test_an_error_of_the_program_is_not_a_record(workplace, monkeypatch):
    """Catches a bug that is reported as a mistake of the user."""
    monkeypatch.setattr(seeds, "run_passes", lambda *_: (_ for _ in ()).throw(RuntimeError("sizes do not match")))
    with pytest.raises(RuntimeError, match="sizes do not match"):
        predict(workplace.config, silent)


def test_numbers_that_are_not_finite_are_one_record(workplace, monkeypatch):
    """Catches a diverged target that ends the run, or that is written."""
    real = seeds.structure_of

    def diverged(target: Any, *rest: Any) -> Any:
        structure = real(target, *rest)
        if target.query.name == "alpha_A":
            structure.positions[3] = float("nan")
        return structure

    monkeypatch.setattr(seeds, "structure_of", diverged)
    found = predict_records(workplace.config, silent)
    assert [result.name for result in found.results] == ["beta_A"]
    assert "residue 4" in found.failures[0].reason
    assert {path.name for path in workplace.config.output.iterdir()} == {
        "beta_A",
        "failures.json",
        "index.html",
        "predictions.csv",
    }


def test_the_exit_code_says_that_a_record_failed(workplace, finished: Finished, monkeypatch):
    """Catches success reported to a script although a record has no result."""
    monkeypatch.setattr(command, "under_launcher", lambda: False)
    assert command.run(workplace.config, []) == 0
    config = _empty(workplace)
    assert command.run(config, []) == 1


def test_a_name_that_stands_twice_keeps_the_first(workplace):
    """Catches a page and a table without the record that was predicted, because another of its name failed."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>alpha_A\n{OTHER}\n")
    found = predict_records(workplace.config, silent)
    assert [(result.name, found.failures[0].name) for result in found.results] == [("alpha_A", "alpha_A")]
    table = (workplace.config.output / "predictions.csv").read_text()
    assert [line.split(",")[0] for line in table.splitlines()] == ["target", "alpha_A"]
    assert "alpha_A/report.html" in (workplace.config.output / "index.html").read_text()
