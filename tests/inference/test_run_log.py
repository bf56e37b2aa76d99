"""The log file of a run of `evodsp predict`."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.errors import UserError
from evodsp.inference import command, seeds
from evodsp.inference.results import run_log

from .conftest import Workplace

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
