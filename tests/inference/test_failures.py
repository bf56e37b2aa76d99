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

from .conftest import OTHER, QUERY, Finished, Workplace


@pytest.fixture
def workplace(workplace: Workplace) -> Workplace:
    """One seed shows what fails."""
    return Workplace(workplace.root, workplace.change(seeds=1))


def _two_equal_names(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>alpha_A\n{OTHER}\n")
    return workplace.config, r"targets\.fasta:3.*alpha_A"


def _no_alignment_in_folder(workplace):
    alignment = workplace.config.alignments / "beta_A" / "uniref90_hits.a3m"
    alignment.rename(alignment.with_suffix(".txt"))
    return workplace.config, "beta_A"


def _query_differs(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\n{OTHER[:4]}W{OTHER[5:]}\n")
    return workplace.config, r"uniref90_hits\.a3m.*(position|residue) 5"


def _query_of_another_length(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\n{OTHER}AA\n")
    return workplace.config, r"10 .*12|12 .*10"


def _truncated_alignment(workplace):
    path = workplace.config.alignments / "beta_A" / "uniref90_hits.a3m"
    path.write_text(path.read_text()[:-5])
    return workplace.config, r"uniref90_hits\.a3m:\d+"


def _empty(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\n")
    return workplace.config, r"targets\.fasta:3: sequence 'beta_A' is empty"


def _all_unknown(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\n{'X' * 10}\n")
    return workplace.config, r"beta_A: all 10 residues are X"


def _letters_that_are_none(workplace):
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\nGST1!\n")
    return workplace.config, r"targets\.fasta:4: illegal letter '1' at position \d+ of sequence 'beta_A'"


def _far_too_long(workplace):
    long = OTHER * 10_000
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>beta_A\n{long}\n")
    (workplace.config.alignments / "beta_A" / "uniref90_hits.a3m").write_text(f">beta_A\n{long}\n")
    return workplace.config, r"beta_A: 100,000 residues do not fit; the pair representation alone takes"


@pytest.mark.parametrize(
    "break_record",
    [
        _two_equal_names, _no_alignment_in_folder, _query_differs, _query_of_another_length,
        _truncated_alignment, _empty, _all_unknown, _letters_that_are_none, _far_too_long,
    ],
    ids=lambda break_record: break_record.__name__.strip("_"),
)  # fmt: skip
def test_a_broken_record_is_named_and_the_other_goes_on(workplace, break_record):
    """Catches one bad record of many that ends the run, or that is lost without a word."""
    config, words = break_record(workplace)
    lines: list[str] = []
    found = predict_records(config, lines.append)
    assert [result.name for result in found.results] == ["alpha_A"]
    (failure,) = found.failures
    assert re.search(words, failure.reason)
    assert f"failed: {failure.reason}" in lines
    assert lines[-1].startswith("1 done, 0 kept, 1 failed; reasons in ")
    listed = read_json(config.output / "failures.json")["failures"]
    assert listed == [{"name": failure.name, "reason": failure.reason}]
    assert {path.name for path in config.output.iterdir()} == {
        "alpha_A",
        "failures.json",
        "index.html",
        "predictions.csv",
    }


@pytest.mark.parametrize(
    "name", ["failures.json", "index.html", "index_evodsp.html", "predictions.csv", "predict.log", "_alignments"]
)
def test_a_record_that_would_take_the_place_of_another_file_is_named(workplace, name):
    """Catches a folder of results where the run writes its own file, so that the run ends with its last line missing."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>{name}\n{OTHER}\n")
    found = predict_records(workplace.config, silent)
    assert [result.name for result in found.results] == ["alpha_A"]
    (failure,) = found.failures
    assert failure.reason.startswith(f"the name '{name}' is that of a file or folder of evodsp's own")
    assert not (workplace.config.output / name).is_dir()


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
    config, _ = _empty(workplace)
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
    config, _ = _empty(workplace)
    assert command.run(config, []) == 1


@pytest.mark.verify
def test_forty_records_of_which_five_are_hostile(workplace):
    """Catches any of them that ends the run, and a good record that is lost with them."""
    hostile = {"empty": "", "long": OTHER * 10_000, "letters": "GST1!", "broken": OTHER, "unknown": "X" * 10}
    good = [f"good_{number}" for number in range(35)]
    records = [(name, OTHER) for name in good]
    for place, record in zip((0, 9, 18, 27, 39), hostile.items(), strict=True):
        records.insert(place, record)
    workplace.config.fasta.write_text("".join(f">{name}\n{letters}\n" for name, letters in records))
    (workplace.root / "flat").mkdir()
    (workplace.root / "flat" / "broken.a3m").write_bytes(b"\x93\x00no alignment")
    config = workplace.change(alignments=workplace.root / "flat", seeds=1)
    found = predict_records(config, silent)
    assert [result.name for result in found.results] == good
    assert {failure.name for failure in found.failures} == set(hostile)
    assert found.line == "35 done, 0 kept, 5 failed"
    assert {path.name for path in config.output.iterdir()} == {*good, "failures.json", "index.html", "predictions.csv"}
