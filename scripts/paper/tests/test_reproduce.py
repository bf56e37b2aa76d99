"""The command `python -m scripts.paper.reproduce`: what it keeps, what it measures again, and its messages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from scripts.benchmarks.tables import write_csv
from scripts.paper import reproduce
from scripts.paper.part import Part, Tables, Tick, read_csv

pytestmark = pytest.mark.verify


class Counted:
    """Stands in for the parts: two that count how often they are measured."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.wrong: list[str] = []
        self.failing = ""
        self.parts = [self._part("first"), self._part("second")]

    def _part(self, name: str) -> Part:
        def measure(tick: Tick) -> Tables:
            self.calls.append(name)
            if name == self.failing:
                raise KeyboardInterrupt
            tick("something")
            return {f"{name}_table": [{"n": 1, "share": "1/2"}, {"n": 2, "share": 0.5}]}

        return Part(
            name,
            {"sizes": [1, 2]},
            ("part.py",),
            measure,
            wrong=lambda tables: self.wrong,
        )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(reproduce, "parts", lambda quick: found.parts)
    return found


def test_what_is_done_is_kept_and_what_changed_is_measured_again(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that starts anew after an interruption, and a result of other sizes or sources that is kept."""
    words = ["--only", "first", "second", "--output", str(tmp_path)]
    counted.failing = "second"
    with pytest.raises(KeyboardInterrupt):
        reproduce.main(words)
    counted.failing = ""
    assert reproduce.main(words) == 0
    assert counted.calls == ["first", "second", "second"]
    assert reproduce.main(words) == 0
    assert len(counted.calls) == 3
    counted.parts[0] = dataclasses.replace(counted.parts[0], settings={"sizes": [3]})
    reproduce.main(words)
    assert counted.calls[3:] == ["first"]
    (tmp_path / "second_table.csv").unlink()
    reproduce.main(words)
    assert counted.calls[4:] == ["second"]
    reproduce.main([*words, "--overwrite"])
    assert counted.calls[5:] == ["first", "second"]
    monkeypatch.setattr(reproduce, "fingerprint", lambda part: "another")
    reproduce.main(words)
    assert counted.calls[7:] == ["first", "second"]
    made = json.loads((tmp_path / "first.json").read_text())
    assert {"date", "commit", "machine", "seconds", "settings"} <= made.keys()


def test_a_count_that_contradicts_the_paper_fails_and_is_not_kept(counted: Counted, tmp_path: Path) -> None:
    """Catches a wrong count that ends with exit code 0, or that the next run takes as done."""
    counted.wrong = ["8 M, not 2 M"]
    for _ in range(2):
        assert reproduce.main(["--only", "first", "--output", str(tmp_path)]) == 1
    assert counted.calls == ["first", "first"]


def test_tables_come_back_as_they_were(tmp_path: Path) -> None:
    """Catches a fraction or an empty cell that a plot would read as something else."""
    rows = [{"a": 1, "b": "1/2"}, {"a": 2.5, "b": "", "c": "x"}]
    write_csv(tmp_path / "table.csv", rows)
    assert read_csv(tmp_path / "table.csv") == [{"a": 1, "b": "1/2", "c": ""}, {"a": 2.5, "b": "", "c": "x"}]


def test_a_quick_run_of_everything(tmp_path: Path) -> None:
    """Catches a part that fails on real ranks, and a table or plot that is not written. Takes a minute."""
    assert reproduce.main(["--quick", "--output", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"volumes.csv", "memory_layer.csv", "time_steps.csv", "modelled.csv", "volumes.png", "time.png"} <= names
