"""The output folder: seeds and formats that are added, the user's own files, the table, the log and the progress."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evodsp.errors import UserError
from evodsp.inference import command, jobs, results, seeds
from evodsp.inference import predict as module
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.results import _COLUMNS, RANKING, result_folders, run_log, write_batch_table
from evodsp.inference.score.table import StructureScores, columns_of, write_scores
from tests.builders.prediction import read_json, silent

from .conftest import Finished, Workplace

RESULTS = ("ranking.json", "seed_0.cif", "seed_1.cif", "seed_2.cif", "seed_2_scores.json")


def contents(folder: Path, names: tuple[str, ...] = RESULTS) -> list[bytes]:
    """The bytes of a target's files."""
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.verify
def test_seeds_are_added(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches stored seeds that are predicted again, lost, or ranked apart from the new ones."""
    workplace.only("alpha_A")
    first = predict(workplace.change(seeds=1), silent)[0]
    before = (first.folder / "seed_0.cif").stat().st_mtime_ns
    runs: list[int] = []
    real = seeds.run_passes
    monkeypatch.setattr(seeds, "run_passes", lambda *given: runs.append(1) or real(*given))
    found = predict_records(workplace.change(seeds=3), silent)
    assert len(runs) == 2
    assert [result.kept for result in found.results] == [False]
    assert (first.folder / "seed_0.cif").stat().st_mtime_ns == before
    whole = predict(workplace.change(seeds=3, output=workplace.root / "whole"), silent)[0]
    assert contents(found.results[0].folder) == contents(whole.folder)
    timings = read_json(found.results[0].folder / "timings.json")
    assert [entry["seed"] for entry in timings["seeds"]] == [0, 1, 2]
    assert all(result.kept for result in predict(workplace.change(seeds=2), silent)), "three hold two"


def test_a_format_is_added_without_the_model(
    workplace: Workplace, finished: Finished, predicted: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a format that is computed again, or that differs from one that is written at once."""
    workplace.only("alpha_A")
    as_pdb = predict(workplace.change(format="pdb", output=workplace.root / "pdb"), silent)[0]
    shutil.copytree(as_pdb.folder, workplace.root / "at_once")
    monkeypatch.setattr(jobs, "load_model", lambda *_: pytest.fail("the model was loaded for nothing"))
    for one, other, folder, at_once in (
        ("cif", "pdb", finished.results[0].folder, workplace.root / "at_once"),
        ("pdb", "cif", as_pdb.folder, predicted.results[0].folder),
    ):
        config = workplace.change(output=folder.parent)
        added = predict(replace(config, format=other), silent)[0]
        assert not added.kept
        assert all(result.kept for name in (one, other) for result in predict(replace(config, format=name), silent))
        names = ("ranking.json", f"seed_0.{other}", f"seed_1.{other}")
        assert contents(added.folder, names) == contents(at_once, names)
        assert (added.folder / f"seed_1.{one}").is_file()


def test_a_users_files_stay(workplace: Workplace) -> None:
    """Catches a user's notes that stop a prediction, or are lost when seeds are added or results replaced."""
    workplace.only("alpha_A")
    folder = workplace.config.output / "alpha_A"
    (folder / "figures").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "figures" / "view.png").write_text("mine too")
    for change in ({"seeds": 1}, {"seeds": 2}, {"seeds": 1, "overwrite": True}):
        found = predict_records(workplace.change(**change), silent)
        assert not found.failures
        assert (folder / "notes.txt").read_text() == "mine"
        assert (folder / "figures" / "view.png").read_text() == "mine too"
    assert not (folder / "seed_1.cif").exists()


def test_other_numerics_are_other_results(
    workplace: Workplace, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches seeds of two versions that compute different numbers in one ranking."""
    monkeypatch.setattr("evodsp.inference.jobs.NUMERICS", {"monomer": 2, "multimer": 2})
    with pytest.raises(UserError, match="numerics: 1 there, 2 now"):
        predict(workplace.change(seeds=3), silent)


@pytest.fixture
def long_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed takes so long that it is written at once."""
    monkeypatch.setattr(seeds, "WRITE_EVERY_S", 0.0)


def _at_seed(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Raise `error` where alpha_A's seed of this number (counted from 0) begins. Returns the names of the seeds that run."""
    real, ran = seeds._predict_seed, []

    def stop(target: Any, *rest: Any) -> Any:
        if target.query.name == "alpha_A" and len(ran) == number:
            raise error
        ran.append(target.query.name)
        return real(target, *rest)

    monkeypatch.setattr(seeds, "_predict_seed", stop)
    return ran


def _files(workplace: Workplace, output: str) -> dict[str, bytes]:
    """What the files of a target hold that do not depend on the time."""
    folder = workplace.root / output / "alpha_A"
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("timings.json", "report.html")}


@pytest.mark.usefixtures("long_chains")
def test_ctrl_c_costs_one_seed(workplace, monkeypatch):
    """Catches finished seeds that are lost, predicted again, or unlike those of a run that nobody interrupted."""
    workplace.only("alpha_A")
    config = workplace.change(seeds=3)
    with monkeypatch.context() as patch:
        _at_seed(patch, 2, KeyboardInterrupt())
        patch.setattr(command, "under_launcher", lambda: False)
        with pytest.raises(KeyboardInterrupt, match="the same command again keeps what is finished"):
            command.run(config, [])
    ranking = read_json(config.output / "alpha_A" / "ranking.json")["ranking"]
    assert sorted(entry["seed"] for entry in ranking) == [0, 1]
    ran = _at_seed(monkeypatch, 99, KeyboardInterrupt())
    lines: list[str] = []
    found = predict(config, lines.append)
    assert ran.count("alpha_A") == 1
    assert "  2 seeds of an earlier run kept" in lines
    assert [result.kept for result in found] == [False]
    entries = read_json(config.output / "alpha_A" / "timings.json")["seeds"]
    assert [entry["seed"] for entry in entries] == [0, 1, 2]
    monkeypatch.undo()
    predict(workplace.change(seeds=3, output=workplace.root / "whole"), silent)
    assert _files(workplace, "deep/out") == _files(workplace, "whole")


def test_short_chains_are_written_once(workplace, monkeypatch):
    """Catches a folder that is written again for every seed of a chain that takes a second."""
    written: list[int] = []
    real = module.write_results

    def count(folder: Any, structures: Any, *rest: Any) -> Any:
        written.append(len(structures))
        return real(folder, structures, *rest)

    monkeypatch.setattr(module, "write_results", count)
    predict(workplace.change(seeds=3), silent)
    assert written == [3, 3]


def test_a_seed_that_fails_leaves_those_before_it(workplace, monkeypatch):
    """Catches seeds that are lost with a later one, a failure that is not named, and an exit code that hides it."""
    config = workplace.change(seeds=3)
    monkeypatch.setattr(command, "under_launcher", lambda: False)
    with monkeypatch.context() as patch:
        _at_seed(patch, 1, UserError("alpha_A: residue 4 has no finite position"))
        assert command.run(config, []) == 1
    failures = read_json(config.output / "failures.json")["failures"]
    assert [failure["name"] for failure in failures] == ["alpha_A"]
    assert failures[0]["reason"] == (
        f"alpha_A: residue 4 has no finite position; finished before: 1 prediction, in {config.output / 'alpha_A'}"
    )
    assert (config.output / "alpha_A" / "report.html").is_file()
    ran = _at_seed(monkeypatch, 99, KeyboardInterrupt())
    assert command.run(config, []) == 0
    assert ran == ["alpha_A", "alpha_A"]


def test_the_only_record_fails_after_a_seed(workplace, monkeypatch):
    """Catches a run that says 'nothing is written' (exit code 2) though a seed is, Python code that goes on without, and a
    table that lacks it."""
    workplace.config.fasta.write_text(workplace.config.fasta.read_text().split(">beta_A")[0])
    _at_seed(monkeypatch, 1, UserError("alpha_A: too large"))
    found = predict_records(workplace.config, silent)
    assert (found.results, [failure.some_written for failure in found.failures]) == ([], [True])
    _at_seed(
        monkeypatch, 0, UserError("alpha_A: too large")
    )  # this run writes none, but what is there is of the same inputs
    found = predict_records(workplace.config, silent)
    assert [failure.some_written for failure in found.failures] == [True]
    table = (workplace.config.output / "predictions.csv").read_text()
    assert [line.split(",")[0] for line in table.splitlines()] == ["target", "alpha_A"]
    assert {path.name for path in workplace.config.output.iterdir()} == {
        "alpha_A",
        "failures.json",
        "index.html",
        "predictions.csv",
    }
    monkeypatch.undo()
    _at_seed(monkeypatch, 0, UserError("alpha_A: too large"))
    with pytest.raises(UserError, match="alpha_A: too large"):
        predict(workplace.config, silent)


@pytest.mark.usefixtures("long_chains")
def test_overwriting_replaces_all_seeds(workplace):
    """Catches seeds of the run that is replaced, and of an earlier format, among the new ones."""
    workplace.only("alpha_A")
    predict(workplace.change(seeds=3, recycles=1, format="pdb"), silent)
    predict(workplace.change(seeds=2, overwrite=True), silent)
    folder = workplace.config.output / "alpha_A"
    assert {path.name for path in folder.glob("seed_*")} == {
        f"seed_{seed}{end}" for seed in (0, 1) for end in (".cif", "_scores.json", "_contacts.npz")
    }


def test_what_a_killed_run_left_is_removed(workplace):
    """Catches half-written folders that pile up in the output, and those of other records, which another run may be writing."""
    output = workplace.config.output
    for name in (".alpha_A.123.partial", ".alpha_A_2.123.partial", ".alpha_A.mine.partial"):
        (output / name).mkdir(parents=True)
        (output / name / "seed_0.cif").write_text("half")
    predict(workplace.change(seeds=1), silent)
    assert {path.name for path in output.iterdir() if path.name.startswith(".")} == {
        ".alpha_A_2.123.partial",
        ".alpha_A.mine.partial",
    }


def test_each_prediction_has_a_line(predicted: Finished) -> None:
    """Catches a target or a seed that is left out, lines in another order than the ranking's, and a path that leads nowhere."""
    output = predicted.results[0].folder.parent
    with (output / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["target"], row["rank"]) for row in rows] == [
        ("alpha_A", "1"), ("alpha_A", "2"), ("beta_A", "1"), ("beta_A", "2"),
    ]  # fmt: skip
    for result, (first, second) in zip(predicted.results, (rows[:2], rows[2:]), strict=True):
        assert float(first["mean_plddt"]) == result.mean_plddt[result.best] >= float(second["mean_plddt"])
        assert (output / first["structure"]) == result.structure()
        assert {first["seed"], second["seed"]} == {"0", "1"}
    assert [row["residues"] for row in rows[::2]] == ["22", "10"]


def test_names_that_a_spreadsheet_computes_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record `=2+3` that a spreadsheet shows as 5, in predictions.csv and in the tables of scores, and a number
    below 0 that is turned into a text."""
    names = ["=2+3", "+1+1", "-1", "@SUM(1)", "\t=1", "\r=1", "a=1"]
    row = dict.fromkeys(_COLUMNS, -1.5)
    monkeypatch.setattr(results, "_rows", lambda _: [row | {"target": name} for name in names])
    scores = [StructureScores(name, "=test", 1, 1, -1.5, 0.0, 0.0, 0.0, 0.0) for name in names]
    write_scores(columns_of("chains"), scores, "chain", tmp_path / "scores.csv")
    tables = {write_batch_table(tmp_path): ("target", "mean_plddt"), tmp_path / "scores.csv": ("chain", "plddt")}
    for path, (name, number) in tables.items():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        found = [row[name] for row in rows]
        assert all(text.startswith("'") for text in found[:-1])
        assert [found[0], found[-1]] == ["'=2+3", "a=1"]
        assert {row[number] for row in rows} == {"-1.5"}
    assert rows[0]["split"] == "'=test"


def test_targets_are_ordered_as_people_count(tmp_path: Path) -> None:
    """Catches variant_10 before variant_2."""
    for name in ("v_10", "v_2", "v", "10", "v_2_b", "v_02"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RANKING).write_text("{}")
    (tmp_path / "other").mkdir()
    assert [folder.name for folder in result_folders(tmp_path)] == ["10", "v", "v_02", "v_2", "v_2_b", "v_10"]


WORDS = ["predict", "a b.fasta", "--seeds", "2"]


def without_times(log: Path) -> list[str]:
    """The lines of a log, without date and time; its heads whole."""
    return [line if line.startswith("#") else line[20:] for line in log.read_text().splitlines()]


def test_everything_that_a_run_says_is_in_its_log(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a line that is missing in the file, a second run that replaces the first, and a head without its command."""
    monkeypatch.setattr(command, "under_launcher", lambda: False)
    said = []
    for _ in range(2):
        assert command.run(workplace.change(seeds=1), WORDS) == 0
        said.append(capsys.readouterr().out.splitlines())
    lines = without_times(workplace.config.output / "predict.log")
    heads = [number for number, line in enumerate(lines) if line.startswith("# ")]
    assert [lines[heads[0] + 1 : heads[1]], lines[heads[1] + 1 :]] == said
    assert lines[0].endswith(": evodsp predict 'a b.fasta' --seeds 2")
    assert "2 kept" in said[1][-1]


def test_a_run_without_any_result_leaves_no_log(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an output folder that holds nothing but the log of a run that failed."""
    monkeypatch.setattr(command, "under_launcher", lambda: False)
    monkeypatch.setattr(seeds, "run_passes", lambda *_: (_ for _ in ()).throw(MemoryError()))
    before = workplace.snapshot()
    with pytest.raises(UserError, match="None of the 2 records"):
        command.run(workplace.config, WORDS)
    assert workplace.snapshot() == before


@pytest.mark.parametrize("there", ["earlier/predict.log", "earlier/notes.txt"])
def test_what_was_there_stays(tmp_path: Path, there: str) -> None:
    """Catches a user's folder, or the log of earlier runs, that a failed run removes; and an error that is not in the log."""
    (tmp_path / "earlier").mkdir()
    (tmp_path / there).write_text("earlier\n")

    def fail() -> None:
        with run_log(tmp_path / "earlier", WORDS, lambda line: None) as say:
            say("first")
            raise UserError("too long")

    with pytest.raises(UserError, match="too long"):
        fail()
    assert (tmp_path / there).read_text().startswith("earlier\n")
    assert without_times(tmp_path / "earlier" / "predict.log")[-2:] == ["first", "error: too long"]


@pytest.mark.parametrize("ensembles", [1, 2])
def test_every_block_of_every_pass_counts(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, ensembles: int
) -> None:
    """Catches blocks that are not counted, a total that is never reached, and hooks that stay for the next seed."""
    counted: list[list[int]] = []
    named: list[str] = []

    @contextmanager
    def watched(what: str, total: int) -> Iterator[object]:
        counted.append([total, 0])
        named.append(what)

        def advance(more: int) -> None:
            counted[-1][1] += more

        yield advance

    monkeypatch.setattr(seeds, "progress", watched)
    workplace.only("alpha_A")
    predict(workplace.change(recycles=1, seeds=2, ensembles=ensembles), silent)
    assert len(counted) == 2
    assert all(total == done > 0 for total, done in counted)
    assert named[1] == f"alpha_A, seed 1: blocks of {2 * ensembles} passes"


@pytest.mark.verify
def test_a_redirected_log_shows_lines_as_they_come(workplace: Workplace) -> None:
    """Catches a log file that stays empty until the run ends."""
    names = ("fasta", "alignments", "checkpoint", "output", "recycles", "device", "msa_clusters", "extra_msa")
    words = [f"--{name}={getattr(workplace.config, name)}" for name in names]
    log = workplace.root / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, "-m", "evodsp", "predict", *words, "--seeds=5000"]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            while process.poll() is None and "seed 0: model" not in log.read_text():
                time.sleep(0.1)
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()
            process.wait()
