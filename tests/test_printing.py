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
from evodsp.inference.report import ChainScores, write_scores
from evodsp.inference.run_log import run_log
from evodsp.printing import escape_html, escape_others, logger, one_line, printable, quoted, show, tell
from evodsp.progress import progress
from evodsp.report.page import Page
from evodsp.training.progress import TrainingProgress

EVIL = "a\x1b[31m\x1b]0;owned\x07\r\x08\0\x7f\x9b\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\ud800\udcff"
SHOWN = r"a\x1b[31m\x1b]0;owned\x07\r\x08\x00\x7f\x9b\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff"
SHOWN += r"\ud800\udcff"
_WRITE = ("getLogger", "write", "print")
_PAST = ("logging.getLogger(__name__)", "sys.stderr.write(", "sys.stdout.write(", "console.print(")
_ALLOWED = (r"sys.stdout.write('\n')", "console.print(printable(", "console.print(figures")
PACKAGE = Path(printing.__file__).parent


def test_what_acts_on_a_terminal_is_escaped() -> None:
    """Catches a kind of character that is forgotten, and letters, tabs and ends of lines that are not left alone."""
    assert printable(EVIL) == SHOWN
    assert printable(printable(EVIL)) == SHOWN
    for code in [
        *range(32),
        0x7F,
        *range(0x80, 0xA0),
        0x61C,
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    ]:
        assert printable(chr(code)).isprintable() or chr(code) in "\t\n", hex(code)
    usual = "zappé 5 Å → 3.8 µm … „蛋白质“ 😀\tx\n"
    assert printable(usual) == usual


def test_messages_of_one_line_are_cut() -> None:
    """Catches a foreign text of megabytes on the terminal, and one whose ends of lines look like other messages."""
    assert one_line(f"a\n b\r\nc{EVIL}") == rf"a b\r c{SHOWN}"
    assert one_line("x" * 2500) == "x" * 2000 + "… (500 more characters)"
    assert quoted(b"\xff<html>\n\x1b[2J" + b"y" * 500) == "\ufffd<html> \\x1b[2J" + "y" * 65 + "…"
    assert quoted("short\nand sweet") == "short and sweet"
    assert len(quoted("\x1b" * 10**6)) == 81


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://name:secret@host/x", "https://…@host/x"),
        ("--url=http://secret@host:80, and http://a:b@c@d/", "--url=http://…@host:80, and http://…@d/"),
        ("https://host/a@b, me@host", "https://host/a@b, me@host"),
    ],
)
def test_passwords_in_addresses_are_left_out(text: str, shown: str) -> None:
    """Catches a password that a message, a log or a page shows, and other texts with an @ that lose letters."""
    assert printable(text) == shown


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
    write_scores([ChainScores(EVIL, "test", 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0)], tmp_path / "scores.csv")
    assert SHOWN in (tmp_path / "scores.csv").read_text()
    page = Page(f"<b>{EVIL}")
    page.table([EVIL], [[EVIL]])
    assert page.html().count(SHOWN) == 4
    assert printable(page.html()) == page.html()
    assert escape_html("<\x1b>") == r"&lt;\x1b&gt;"


def test_progress_escapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches rich, which writes escape sequences of its own and so takes others' as they are."""
    monkeypatch.setattr("evodsp.progress.SECONDS_BETWEEN_LINES", -1.0)
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


def test_a_quote_that_is_cut_says_so() -> None:
    """Catches text of many blanks or line ends that is cut without a word: it reads as if it were all that was written."""
    assert quoted("a  " * 60, 80) == "a " * 40 + "…"
    assert quoted(b"a\n\n" * 60, 80) == "a " * 40 + "…"
    assert quoted("a  b", 80) == "a b"
