"""Predictions into a folder that holds some already: seeds and formats are added, and the user's own files stay."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evodsp.errors import UserError
from evodsp.inference import jobs, seeds
from evodsp.inference.predict import predict, predict_records
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
