"""All that evodsp prints and logs goes through here: text of others is shown and cannot act.

Messages quote names in files and answers of servers. Control characters among them (escape sequences, carriage returns) would
command a terminal: colour it, rename its window, overwrite what stands there. Marks that change the direction of text, and
letters of no width, make a name look like another one. They are written as Python writes them, such as \\x1b and \\u202e. A
user name and password in an address are left out.
"""

from __future__ import annotations

import html
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType

LONGEST_LINE = 2000
"""Characters of a one-line message that are shown."""
LONGEST_QUOTED = 80
"""Characters of somebody else's text that a message quotes."""
_ACTS = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters, all but tab and the end of a line
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # directions, ends of lines and paragraphs, no width
    "\ud800-\udfff]"  # bytes of a file's name that are no UTF-8, and halves of letters: no file can hold them
)
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


def printable(text: str) -> str:
    """`text` with everything escaped that would act on a terminal or a page, and without passwords in addresses.

    The ends of lines and tabs stay. Escaping twice is escaping once.
    """
    return _ACTS.sub(lambda found: found[0].encode("unicode_escape").decode(), _LOGIN.sub("…@", text))


def one_line(text: str, most: int = LONGEST_LINE) -> str:
    """`text` as one printable line. What is longer than `most` characters is cut, and the line says so."""
    line = " ".join(printable(text).split())
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more characters)"


def quoted(text: str | bytes, most: int = LONGEST_QUOTED) -> str:
    """What somebody else has written, as the words of one line: the first `most` characters. For use within a message."""
    begun = text[: 4 * most]  # blanks that follow one another are one
    line = " ".join(printable(begun.decode("utf-8", "replace") if isinstance(begun, bytes) else begun).split())
    return line if len(line) <= most else f"{line[:most]}…"


def escape_html(text: str) -> str:
    """`printable(text)` as text of an HTML page."""
    return html.escape(printable(text))


def write_line(write: Callable[[str], object], text: str) -> None:
    """Give a line, or several, to the method of a file that people read."""
    write(f"{printable(text)}\n")


def show(text: str, flush: bool = False) -> None:
    """Print results on standard output."""
    write_line(sys.stdout.write, text)
    if flush:
        sys.stdout.flush()


def tell(text: str) -> None:
    """Print a message on standard error, at once."""
    write_line(sys.stderr.write, text)
    sys.stderr.flush()


def logger(name: str) -> logging.Logger:
    """The logger of a module. What it logs is printable, whoever handles it and in whatever process."""
    found = logging.getLogger(name)
    found.addFilter(_printable_record)
    return found


def _printable_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def escape_others() -> None:
    """Escape also what other libraries log and warn of, and tracebacks, in this process. For a process that is evodsp's own: a
    program that imports evodsp prints as it likes."""
    logging.setLogRecordFactory(_Record)
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given, **named: printable(format_warning(*given, **named))
    sys.excepthook = _traceback


def _traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))
