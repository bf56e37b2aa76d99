"""What is printed, logged and put on pages: text of others is shown there and cannot act."""

from __future__ import annotations

import ast
import io
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from evodsp import printing
from evodsp.cli import main
from evodsp.inference.results import run_log
from evodsp.inference.score.table import StructureScores, columns_of, write_scores
from evodsp.printing import counted, escape_others, logger, printable, progress, show, tell
from evodsp.report.page import Page
from evodsp.training.logs import TrainingProgress
from tests.builders.hostile import EVIL, SHOWN

_WRITE = ("getLogger", "write", "print")
_PAST = ("logging.getLogger(__name__)", "sys.stderr.write(", "sys.stdout.write(", "console.print(")
_ALLOWED = (r"sys.stdout.write('\n')", "console.print(printable(", "console.print(figures")
PACKAGE = Path(printing.__file__).parent


def test_all_ways_to_print_escape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches one of the functions that print, of the log's file, of the lines of progress and of the table of scores that
    writes as it is given."""
    show(EVIL)
    tell(EVIL)
    assert capsys.readouterr() == (f"{SHOWN}\n", f"{SHOWN}\n")
    assert main([f"pre\x1b[31mdict{EVIL}"]) == 2
    assert "no command 'pre\\x1b[31mdicta\\x1b[31m" in capsys.readouterr().err
    with run_log(tmp_path, ["--msa_server", "https://a:secret@host"], show) as say:
        say(EVIL)
    written = (tmp_path / "predict.log").read_text()
    assert SHOWN in written
    assert "secret" not in written
    row = StructureScores(EVIL, "test", 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0)
    write_scores(columns_of("chains"), [row], "chain", tmp_path / "scores.csv")
    assert SHOWN in (tmp_path / "scores.csv").read_text()
    page = Page(f"<b>{EVIL}")
    page.table([EVIL], [[EVIL]])
    assert page.html().count(SHOWN) == 4
    assert printable(page.html()) == page.html()


def test_progress_escapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches rich, which writes escape sequences of its own and so takes others' as they are."""
    monkeypatch.setattr("evodsp.printing.SECONDS_BETWEEN_LINES", -1.0)
    with progress(EVIL, 2) as advance:
        advance(1)
    assert f"{SHOWN}: 1 of 2" in capsys.readouterr().err
    written = io.StringIO()
    TrainingProgress(Console(file=written, width=400)).print(EVIL)
    assert written.getvalue() == f"{SHOWN}\n"


def test_logs_escape(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Catches a warning of a reader that is logged in a worker process, or in a program that imports evodsp, as it came."""
    logger("evodsp.somewhere").warning("chain %s: %s", EVIL, 3)
    assert caplog.messages == [f"chain {SHOWN}: 3"]


def test_what_other_libraries_print_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches warnings, logs and tracebacks that quote a name to a terminal as it is."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    factory = logging.getLogRecordFactory()
    try:
        escape_others()
        logging.getLogger("of.another").warning("%s", EVIL)
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == [SHOWN]
    assert SHOWN in warnings.formatwarning(UserWarning(EVIL), UserWarning, "file", 1)
    error = ValueError(EVIL)
    sys.excepthook(ValueError, error, None)
    assert capsys.readouterr().err == f"ValueError: {SHOWN}\n"


def test_a_number_and_its_noun_agree() -> None:
    """Catches '1 devices', '0 device' and '2 passs'."""
    said = [counted(number, noun) for noun in ("device", "pass", "complex", "batch") for number in (0, 1, 1200)]
    assert said == ["0 devices", "1 device", "1,200 devices", "0 passes", "1 pass", "1,200 passes", "0 complexes", "1 complex",
        "1,200 complexes", "0 batches", "1 batch", "1,200 batches"]  # fmt: skip


def test_nothing_prints_or_logs_past_this_place() -> None:
    """Catches a print, a logger or a write to standard output or error that escapes nothing, anywhere in the package."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "printing.py" or not re.search(r"\bprint\b|getLogger|\.write\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and node.id == "print":
                found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITE:
                call = ast.unparse(node)
                if call.startswith(_PAST) and not call.startswith(_ALLOWED):
                    found.append(f"{path.name}:{node.lineno}")
    assert not found
