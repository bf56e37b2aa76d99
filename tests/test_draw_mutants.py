"""Breaks that are drawn from syntax trees: `scripts/mutation/draw_mutants.py`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.mutation.draw_mutants import (
    ROOT,
    Importers,
    breaks_of,
    drawn,
    marked,
    nearest,
    new_row,
    package_files,
    read_rows,
    same_break,
    write_rows,
)

SOURCE = '''"""A module of 10 lines."""
@decorated(frozen=True)
def f(ä: Size[3], x: int) -> Size[4]:
    if not ä < 2 and f"{x + 1}":
        return g(ä + x, key=True)
    raise ValueError(1 + 1)
@triton.jit
def kernel(x):
    return x - 1
'''


def test_every_break_is_one_change_of_the_source() -> None:
    """Catches breaks at the wrong place (columns are bytes), and those of annotations, decorators, messages and GPU
    kernels, which no test can find."""
    source = SOURCE.encode()
    found = {(change.kind, change.line): change for change in breaks_of("m.py", source)}
    assert {key: (change.text, change.broken) for key, change in found.items()} == {
        ("and, or", 4): ('not ä < 2 and f"{x + 1}"', "not ä < 2 or f'{x + 1}'"),
        ("no not", 4): ("not ä < 2", "ä < 2"),
        ("comparison", 4): ("ä < 2", "ä <= 2"),
        ("one more", 4): ("2", "3"),
        ("first argument", 5): ("g(ä + x, key=True)", "ä + x"),
        ("no keyword", 5): ("g(ä + x, key=True)", "g(ä + x)"),
        ("minus", 5): ("ä + x", "ä - x"),
    }
    for change in found.values():
        assert change.applied(source) == SOURCE.replace(change.text, f"({change.broken})")


def test_marked_expressions_note_what_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mark at the wrong place (columns are bytes), around another expression, or of one that is not executed."""
    monkeypatch.setenv("MARKS", str(tmp_path))
    source = "def f(ä):\n    return g(1 + ä, key=ä > 3) and not ä > 2 or h(0)\n".encode()
    found = list(breaks_of("m.py", source))
    names: dict[str, Any] = {"g": lambda x, key: x > 0, "h": lambda x: 7 + x}
    exec(marked(source, enumerate(found)), names)

    def executed(ä: int) -> set[tuple[str, str]]:
        for path in tmp_path.iterdir():
            path.unlink()
        assert names["f"](ä) == (7 if ä > 2 else True)
        return {(found[int(path.name)].kind, found[int(path.name)].text) for path in tmp_path.iterdir()}

    every = {(one.kind, one.text) for one in found}
    assert len(every) == len(found) == 11
    assert executed(5) == every
    assert every - executed(1) == {("one more", "0")}


def test_a_seed_is_an_order() -> None:
    """Catches draws that cannot be repeated or continued, and one kind that takes most of them: numbers are many."""
    files = package_files(["evodsp/data/samples/raw_features.py"])
    order = drawn(0, files)
    assert order == drawn(0, files) != drawn(1, files)
    assert len(set(order)) == len(order)
    assert len({change.kind for change in order[:5]}) == 5


def test_a_recorded_break_is_found_again(tmp_path: Path) -> None:
    """Catches a row that is tried at another place with the same text, or as if its code were still there, and rows that lose
    a word when they are written anew."""
    file = "evodsp/data/samples/raw_features.py"
    first, second = [
        found for found in breaks_of(file, (ROOT / file).read_bytes()) if found.text == "piece(0, length)"
    ][:2]
    assert first.line < second.line
    rows = [new_row(0, number, replace(found, line=found.line + 1)) for number, found in enumerate([first, second])]
    rows.append({**rows[0], "text": 'two\nlines, "quoted"'})
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv") == rows
    assert [same_break(row) for row in rows] == [first, second, None]


def test_the_nearest_tests_come_first(tmp_path: Path) -> None:
    """Catches a search that tries the tests of other modules until its time is over, or misses imports that are relative, of a
    module's name, or through another module."""
    files = {
        "evodsp/data/samples/crop.py": "", "evodsp/data/other.py": "from .samples.crop import Crop",
        "tests/builders.py": "import evodsp.data.samples.crop", "tests/data/test_through.py": "from tests.builders import y",
        "tests/test_far.py": "from evodsp.data.other import x",
        "tests/data/test_crop.py": "from evodsp.data.samples import crop", "tests/data/test_else.py": "import evodsp.data",
        "tests/test_a.py": "from evodsp.data.samples.crop import Crop",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = Importers(tmp_path).tests("evodsp/data/samples/crop.py")
    assert found == ["tests/data/test_crop.py", "tests/test_a.py", "tests/data/test_through.py", "tests/test_far.py"]
    tests = [
        f"tests/{file}::{name}" for file in ("test_far.py", "test_a.py", "test_b.py") for name in ("t[1]", "t[0]", "u")
    ]
    assert nearest(tests, found) == [
        *("tests/test_a.py::t[0]", "tests/test_a.py::u", "tests/test_far.py::t[0]", "tests/test_far.py::u"),
        *("tests/test_b.py::t[0]", "tests/test_b.py::u", "tests/test_a.py::t[1]", "tests/test_far.py::t[1]"),
        "tests/test_b.py::t[1]",
    ]


@pytest.mark.verify
def test_breaks_of_what_changed_are_found(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Catches changes that no test guards. Half may survive, since some breaks change nothing that a test could see. The output
    names them."""
    revision = pytestconfig.getoption("--changed-since") or "HEAD~1"
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    if not package_files(since=revision):
        pytest.skip(f"no file of the package has changed since {revision}")
    table = tmp_path / "drawn.csv"
    in_ci = pytestconfig.getoption("--budget-minutes") is not None  # four take six minutes, more than CI has
    words = [
        "--since",
        revision,
        "--seed",
        str(int(head[:8], 16)),
        "--number",
        "2" if in_ci else "4",
        "--seconds",
        "20",
        "--output",
        str(table),
    ]
    subprocess.run([sys.executable, "-m", "scripts.mutation.draw_mutants", *words], cwd=ROOT, check=True)
    results = [row["result"] for row in read_rows(table)]
    assert results
    assert results.count("SURVIVED") <= len(results) / 2, table.read_text()


@pytest.mark.verify
def test_results_are_told_apart() -> None:
    """Catches a program that calls everything found: only a test that ran and failed has found a break."""
    done = subprocess.run([sys.executable, "-c", TOLD_APART], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["caught", "SURVIVED", "NOT"], done.stdout + done.stderr


TOLD_APART = """
from dataclasses import replace
from scripts.mutation.draw_mutants import ROOT, breaks_of, copied, reaching, try_break
file, test = "evodsp/rng.py", "tests/test_rng.py::test_known_answers"
rounds = next(found for found in breaks_of(file, (ROOT / file).read_bytes()) if found.text == "10")
with copied() as folder:
    last = list(breaks_of(file, (ROOT / file).read_bytes()))[-1]
    always, never = reaching([rounds, last], [test, "tests/test_errors.py", "-n", "1"], folder, 20.0)
    assert test in always and not never
    for found, by in ((rounds, [test]), (replace(rounds, broken="10 + 0"), [test]), (last, never)):
        print(try_break(found, by, folder, 20.0)[0].split()[0])
"""
