"""`evodsp report`: curves and settings of runs on one page, and what it says of folders that are no runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.report.runs import UNSET, differing, read_runs
from tests.builders.run_folder import CURVE, make_run, write_bar


def test_a_run_that_logged_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches "last loss nan" of a run that was too short to log one: it reads like a run that diverged."""
    (run := tmp_path / "run").mkdir()
    (run / "curve.csv").write_text("step,epoch,seconds,val/lddt_ca\n7,0,7.7,0.25\n")
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert "last loss none   best lDDT-CA (validation) 0.250 at step 8" in capsys.readouterr().out


def test_runs_are_compared_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that is drawn as another, settings that differ but are not shown, and NaN that is not mentioned."""
    runs = [make_run(tmp_path / "a" / "run", seed=1, note="<i>"), make_run(tmp_path / "b" / "run", seed=2, note="<i>")]
    page = tmp_path / "curves.html"
    assert main(["report", *map(str, runs), "--output", str(page)]) == 0
    said, html = capsys.readouterr().out, page.read_text()
    assert f"report: {page}" in said
    for name in ("a/run", "b/run"):
        assert f"run {name}   steps 30   time 9 s   last loss nan   best lDDT-CA (validation) 0.350 at step 30" in said
        assert html.count(f"{name}: 40 at 19") == 1  # the loss chart's point
        assert html.count(f"{name}, validation: 0.25 at 19") == 1
    assert "<tr><td>seed</td>" in html
    assert "output" not in html
    assert "lr" not in html.partition("Settings that differ")[2]
    assert "<i>" not in html
    assert "http" not in html


def test_one_run_shows_all_its_settings(tmp_path: Path) -> None:
    page = tmp_path / "one.html"
    assert main(["report", str(make_run(tmp_path / "run", seed=1)), "--output", str(page)]) == 0
    html = page.read_text()
    assert "<td>model.optimizer.lr</td><td>0.001</td>" in html.partition("<details>")[2].partition("</details>")[0]
    assert re.search(r"<summary>\d+ settings?</summary>", html)


def test_the_bar_is_a_line_with_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bar that is not drawn, that stands in another chart, that is drawn for each of the runs that share it,
    that makes an axis logarithmic, or that passes for the bar of all chains where some have no copy."""
    curve = CURVE.replace(",0.25,0.25", ",0.25,0.03")
    runs = [make_run(tmp_path / name, curve, seed=1) for name in ("one", "two")]
    words, page = [*map(str, runs), "--output", str(tmp_path / "page.html")], tmp_path / "page.html"
    for run in runs:
        write_bar(run, 0.7484)
    assert main(["report", *words]) == 0
    charts = {part.partition("<")[0]: part for part in page.read_text().split("<h3>")[1:]}
    name = "copying the nearest training chain: 0.748"
    assert charts["lDDT-CA"].count(f">··· {name}</text>") == 1
    assert charts["1abc_A"].count(">··· copying 2abc_B: 0.748</text>") == 1
    assert [title for title, chart in charts.items() if 'class="level' in chart] == ["lDDT-CA", "1abc_A"]
    assert ">0.4</text>" in charts["1abc_A"], "its axis is not linear"
    assert "copying the nearest training chain (lDDT-CA) 0.748" in capsys.readouterr().out
    write_bar(runs[1], 0.7484, chains=3)
    assert main(["report", *words]) == 0
    html = page.read_text()
    assert ">··· one: copying the nearest training chain:</text>" in html
    assert "<title>two: copying the nearest training chain (1 of 3 chains): 0.748</title>" in html
    assert ">··· two: copying the nearest training chain (1</text>" in html
    (runs[0] / "baseline.json").unlink()
    capsys.readouterr()
    assert main(["report", *words]) == 0
    assert "copying the nearest training chain (lDDT-CA) none" in capsys.readouterr().out


def test_resumes_are_thin_lines(tmp_path: Path) -> None:
    """Catches a resume that is not shown, that is a chart of its own, or that lies outside of a chart which begins later."""
    rows = (
        "9,0,2.0,50.0,,",
        "19,0,4.0,40.0,0.25,10",
        "29,1,9.0,30.0,0.35,",
        "39,1,9.9,20.0,0.3,30",
        "49,1,11.0,9.0,0.4,",
    )
    run = make_run(tmp_path / "run", "\n".join(["step,epoch,seconds,train/loss,val/lddt_ca,resumed", *rows, ""]))
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    html = page.read_text()
    assert "Thin lines down: the run was resumed." in html
    charts = {part.partition("<")[0]: part for part in html.split("<h3>")[1:]}
    found = {title: re.findall(r'class="moment"[^>]*><title>([^<]*)', chart) for title, chart in charts.items()}
    later = ["run: resumed at step 31"]
    assert found == {
        "Loss": ["run: resumed at step 11", *later],
        "lDDT-CA": later,
        "Seconds a step": later,
    }
    assert main(["report", str(make_run(tmp_path / "other")), str(run), "--output", str(page)]) == 0
    assert 'class="moment s1"' in page.read_text()
    assert main(["report", str(tmp_path / "other"), "--output", str(page)]) == 0
    assert "resumed" not in page.read_text()


def test_what_never_changes_is_a_line_of_text(tmp_path: Path) -> None:
    """Catches charts of a flat line, a single value that passes for a constant, and runs that differ left out."""
    curve = "step,epoch,seconds,train/loss,train/recycles,train/clipped_fraction,train/lr,val/lddt_ca\n"
    runs = []
    for name, rate in (("one", 0.001), ("two", 0.002)):
        rows = [f"{step},0,{step},{50 - step},0,1,{rate},{0.5 if step == 9 else ''}\n" for step in (9, 19)]
        runs.append(str(make_run(tmp_path / name, curve + "".join(rows))))
    page = tmp_path / "page.html"
    assert main(["report", runs[0], "--output", str(page)]) == 0
    assert re.findall("<h3>([^<]*)", page.read_text()) == ["Loss", "lDDT-CA", "Seconds a step"]
    said = "Constant, and not drawn: Learning rate 0.001; Clipped gradients (share) 1; Recycling iterations 0."
    assert said in page.read_text()
    write_bar(Path(runs[0]), 0.9)
    assert main(["report", *runs, "--output", str(page)]) == 0
    assert re.findall("<h3>([^<]*)", page.read_text()) == ["Loss", "lDDT-CA", "Learning rate"]


def test_a_bar_that_was_edited_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or a chart from minus to plus infinity, for a baseline.json that is not the run's."""
    write_bar(run := make_run(tmp_path / "run"), 0.5)
    path = run / "baseline.json"
    good = path.read_text()
    for content in (
        "",
        "[]",
        "{}",
        good.replace("0.5", "1e99"),
        good.replace("0.5", "NaN"),
        good.replace(": 1,", ": [],"),
    ):
        assert content != good
        path.write_text(content)
        assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 2
        error = capsys.readouterr().err
        assert "baseline.json" in error
        assert error.count("\n") == 1


def test_a_pace_is_measured_between_rows(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "run")])
    assert run.pace() == ([19, 29], [0.2, 0.5])
    assert run.best("val/lddt_ca") == (29, 0.35)
    assert run.best("train/loss") == (9, 50.0)  # NaN is no maximum


def test_settings_of_another_version_are_compared_where_they_exist(tmp_path: Path) -> None:
    """Catches every setting of a newer version in the table of differences."""
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", seed=1, added=5)
    other = make_run(tmp_path / "other", seed=2, added=5)
    assert differing(read_runs([old, new, other])) == {"seed": [UNSET, "1", "2"]}


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (None, "its curve.csv is not there"),
        ("step,seconds\n", "its curve.csv has no rows yet"),
        ("step,seconds\n1,2\nx,3\n", "curve.csv:3: step is 'x', expected a number"),
        ("step,seconds\n" + "9" * 5000 + ",3\n", "expected a number: no learning curve"),
        ("a,b\n1,2\n", "curve.csv:2: step is None"),
        ("step,train/loss\n1,high\n", "train/loss of step 1 is 'high'"),
        ("step,train/loss\n1,\x00\n", "curve.csv"),
    ],
)
def test_a_folder_that_is_no_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], curve: str | None, said: str
) -> None:
    run = make_run(tmp_path / "run", curve or "")
    if curve is None:
        (run / "curve.csv").unlink()
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_what_is_given_wrongly_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("a: [")
    for words, said in (
        ([], "required: runs"),
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(run / "curve.csv")], "a file; give the --output folder"),
        ([str(run), f"{run}/."], "given twice"),
        ([str(run)], "config.yaml:1: not YAML"),
    ):
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_time_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an OverflowError for a curve whose seconds are infinite, as an edited file may say."""
    (run := tmp_path / "run").mkdir()
    (run / "curve.csv").write_text("step,epoch,seconds,train/loss\n7,0,inf,2\n")
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert "time inf s" in capsys.readouterr().out
