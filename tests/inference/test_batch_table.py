"""The table of a batch: predictions.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evodsp.inference import results as batch_table
from evodsp.inference.predict import predict
from evodsp.inference.results import _COLUMNS, RANKING, result_folders, write_batch_table
from evodsp.inference.score.table import StructureScores, columns_of, write_scores
from tests.builders.prediction import silent

from .conftest import Workplace


def test_each_prediction_has_a_line(workplace: Workplace) -> None:
    """Catches a target or a seed that is left out, lines in another order than the ranking's, and a path that leads nowhere."""
    results = predict(workplace.change(seeds=2), silent)
    output = workplace.config.output
    with (output / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["target"], row["rank"]) for row in rows] == [
        ("alpha_A", "1"), ("alpha_A", "2"), ("beta_A", "1"), ("beta_A", "2"),
    ]  # fmt: skip
    for result, (first, second) in zip(results, (rows[:2], rows[2:]), strict=True):
        assert float(first["mean_plddt"]) == result.mean_plddt[result.best] >= float(second["mean_plddt"])
        assert (output / first["structure"]) == result.structure()
        assert {first["seed"], second["seed"]} == {"0", "1"}
    assert [row["residues"] for row in rows[::2]] == ["22", "10"]


def test_names_that_a_spreadsheet_computes_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record `=2+3` that a spreadsheet shows as 5, in predictions.csv and in the tables of scores, and a number
    below 0 that is turned into a text."""
    names = ["=2+3", "+1+1", "-1", "@SUM(1)", "\t=1", "\r=1", "a=1"]
    row = dict.fromkeys(_COLUMNS, -1.5)
    monkeypatch.setattr(batch_table, "_rows", lambda _: [row | {"target": name} for name in names])
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


def test_a_users_own_table_stays(workplace: Workplace) -> None:
    """Catches a predictions.csv, such as the input, that is overwritten although evodsp has not written it."""
    output = workplace.config.output
    output.mkdir(parents=True)
    (output / "predictions.csv").write_text("id,sequence\n")
    assert write_batch_table(output) == output / "predictions_evodsp.csv"
    assert (output / "predictions.csv").read_text() == "id,sequence\n"


def test_targets_are_ordered_as_people_count(tmp_path: Path) -> None:
    """Catches variant_10 before variant_2."""
    for name in ("v_10", "v_2", "v", "10", "v_2_b", "v_02"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RANKING).write_text("{}")
    (tmp_path / "other").mkdir()
    assert [folder.name for folder in result_folders(tmp_path)] == ["10", "v", "v_02", "v_2", "v_2_b", "v_10"]
