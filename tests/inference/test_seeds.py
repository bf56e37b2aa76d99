"""Seeds of a target are written as they are finished: neither Ctrl-C nor a seed that fails costs those before it."""

from __future__ import annotations

from typing import Any

import pytest

from evodsp.errors import UserError
from evodsp.inference import command, seeds
from evodsp.inference import predict as module
from evodsp.inference.predict import predict, predict_records
from tests.builders.prediction import read_json, silent

from .conftest import Workplace


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
