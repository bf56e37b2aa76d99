"""Text of others within our own: it is shown and cannot act, and no text is longer than a message."""

from __future__ import annotations

import pytest

from evodsp.printing import one_line, printable, quoted, shown
from tests.builders.hostile import EVIL, SHOWN


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
    assert one_line(f"{'x' * 1500}{'y' * 1000}") == f"{'x' * 1000} […] {'y' * 500}"
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


def test_a_quote_that_is_cut_says_so() -> None:
    """Catches text of many blanks or line ends that is cut without a word: it reads as if it were all that was written."""
    assert quoted("a  " * 60, 80) == "a " * 40 + "…"
    assert quoted(b"a\n\n" * 60, 80) == "a " * 40 + "…"
    assert quoted("a  b", 80) == "a b"


def test_what_a_library_says() -> None:
    """Catches an error without text, of which a message would say nothing between its brackets."""
    assert quoted(ValueError("a\nb")) == "a b"
    assert quoted(MemoryError()) == "MemoryError"
    assert quoted(KeyError("a")) == "'a'"
    assert quoted("") == ""
    assert quoted(ValueError("x" * 1000)) == "x" * 200 + "…"


def test_a_value_is_shown_as_python_writes_it() -> None:
    """Catches a number that cannot be told from a text, and a value of megabytes, or of many levels, in a message."""
    assert (shown(3), shown("3"), shown(None), shown([1.5])) == ("3", "'3'", "None", "[1.5]")
    assert shown(b"\xff3") == "'\ufffd3'"
    assert shown("x" * 10**6) == f"'{'x' * 27}...{'x' * 28}'"
    assert shown([[[[[[1]]]]]]) == "[[[[...]]]]"
    for value in (b"y" * 10**6, 10**4000, list(range(10**6)), dict.fromkeys(range(1000), "x" * 1000), {"x" * 10**6: 1}):
        assert len(shown(value)) < 700
    assert shown(f"\x1b[31m{EVIL}").isprintable()
