"""Breaks that are drawn from syntax trees: `scripts/mutation/draw_mutants.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scripts.mutation.draw_mutants import (
    RESULTS,
    ROOT,
    Importers,
    breaks_of,
    drawn,
    new_row,
    read_rows,
    same_break,
    write_rows,
)

SOURCE = '''"""A module of 7 lines."""
@decorated(frozen=True)
def f(ä: Size[3], x: int) -> Size[4]:
    if not ä < 2 and f"{x + 1}":
        return g(ä + x, key=True)
    raise ValueError(1 + 1)
'''


def test_every_break_is_one_change_of_the_source() -> None:
    """Catches breaks at the wrong place (columns are bytes), and those of annotations, decorators and messages, which no test
    can find."""
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
        assert change.applied(source, change.broken) == SOURCE.replace(change.text, f"({change.broken})")


def test_a_seed_is_an_order() -> None:
    """Catches draws that cannot be repeated or continued, and one kind that takes most of them: numbers are many."""
    order = drawn(0, "evodsp/data/samples/crop.py")
    assert order == drawn(0, "evodsp/data/samples/crop.py") != drawn(1, "evodsp/data/samples/crop.py")
    assert len(set(order)) == len(order)
    assert len({change.kind for change in order[:5]}) == 5


def test_a_recorded_break_is_found_again(tmp_path: Path) -> None:
    """Catches a row that is tried at another place with the same text, or as if its code were still there, and rows that lose
    a word when they are written anew."""
    file = "evodsp/data/samples/crop.py"
    first, second = [
        found for found in breaks_of(file, (ROOT / file).read_bytes()) if found.text == "piece(0, length)"
    ][:2]
    assert first.line < second.line
    rows = [new_row(0, number, replace(found, line=found.line + 1)) for number, found in enumerate([first, second])]
    rows.append({**rows[0], "text": "no such text", "why": 'two\nlines, "quoted"'})
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


def test_no_recorded_break_survives() -> None:
    """Catches a record with a break that no test finds, or one that is called equivalent without a reason."""
    rows = read_rows(RESULTS)
    assert [int(row["number"]) for row in rows] == list(range(100))
    assert {row["seed"] for row in rows} == {"0"}
    for row in rows:
        assert row["why"].endswith(".") if row["result"] == "equivalent" else row["result"] == "caught", row
