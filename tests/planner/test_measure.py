"""`evodsp plan --measure`: the files that it writes, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.planner import measure
from evodsp.planner.device import load_device, load_link


def test_plans_take_the_files_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a device whose link is not the one that was measured, and a file that a plan does not read."""
    device, link = replace(load_device("a100"), tflops_half=123.4), replace(load_link("pcie"), name="measured")
    asked = []

    def measured(ranks: int | None) -> tuple[dict[str, object], dict[str, object]]:
        asked.append(ranks)
        return asdict(device), asdict(link)

    monkeypatch.setattr(measure, "measure", measured)
    assert main(["plan", "--measure", "--gpus", "3", "--output", str(tmp_path / "mine.yaml")]) == 0
    assert asked == [3]
    found = load_device(str(tmp_path / "mine.yaml"))
    assert found.tflops_half == 123.4
    assert load_link(found.inside).name == load_link(found.across).name == "measured"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--gpus is missing"),
        (["--measure"], "--measure needs --output FILE.yaml"),
        (["--measure", "--output", "plan.html"], "but the file of a device needs a name that ends in .yaml"),
        (["--gpus", "2", "--output", "plan.yaml"], "but the page needs a name that ends in .html"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a measurement of a minute whose file is a page, and a plan for no devices."""
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.verify
def test_one_device_is_measured(tmp_path: Path) -> None:
    """Catches a measurement that does not end, or numbers that no device has."""
    assert main(["plan", "--measure", "--gpus", "1", "--output", str(tmp_path / "mine.yaml")]) == 0
    found = load_device(str(tmp_path / "mine.yaml"))
    assert 0.001 < found.tflops_single < 100
    assert 0.02 <= found.products_efficiency <= 2
