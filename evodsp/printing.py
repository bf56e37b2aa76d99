r"""Prints and logs everything that evodsp writes: foreign text is shown without acting on the terminal, and what is long
is cut and says so.

Messages quote names in files and answers of servers. Control characters among them (escape sequences, carriage returns)
would command a terminal: colour it, rename its window, overwrite what stands there. Marks that change the direction of text,
and letters of no width, make a name look like another one. They are written as Python writes them, such as \x1b and \u202e.
A user name and password in an address are left out.

The progress of long work is shown on standard error, with the time left: a bar on a terminal, otherwise a line every 20
seconds.
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

LONGEST_LINE = 2000
"""Characters of a message. The longest that we write lists all options of a group."""
LONGEST_QUOTED = 80
"""Characters of somebody else's text within a message."""
LONGEST_REASON = 200
"""Characters of what a library says is wrong."""
_LONGEST_VALUE = 60
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


def one_line(message: str) -> str:
    """A message of ours, which may quote anything, as one printable line. The middle of a very long one is left out."""
    line = " ".join(printable(message).split())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} […] {line[-LONGEST_LINE // 4 :]}"


def quoted(words: object, most: int | None = None) -> str:
    """Quote text that somebody else has written, for use within a message: the first `most` characters of a text, of
    bytes, or of what a library's error says (the error's name if it says nothing)."""
    is_error = isinstance(words, BaseException)
    most = most or (LONGEST_REASON if is_error else LONGEST_QUOTED)
    begun = (words if isinstance(words, str | bytes) else str(words))[
        : 4 * most
    ]  # blanks that follow one another are one
    line = " ".join(printable(begun.decode("utf-8", "replace") if isinstance(begun, bytes) else begun).split())
    if is_error and not line:
        return type(words).__name__
    return line if len(line) <= most else f"{line[:most]}…"


def shown(value: object) -> str:
    """A value from elsewhere, for use within a message: as Python writes it, without inner parts and the middle where it is
    long. Bytes are shown as the text that they should be."""
    return _values.repr(value.decode(errors="replace") if isinstance(value, bytes) else value)


_values = reprlib.Repr()
_values.maxlevel, _values.maxstring, _values.maxlong, _values.maxother = 3, *3 * [_LONGEST_VALUE]


def write_line(write: Callable[[str], object], text: str) -> None:
    """Give a line, or several, to the method of a file that people read."""
    write(f"{printable(text)}\n")


def counted(number: int, noun: str) -> str:
    """Format a number of things: '1 seed', '1,200 residues' or '2 batches'."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


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
    """The logger of a module. Its messages are escaped for every handler and in every process."""
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
    """Also escape the log messages and warnings of other libraries, and tracebacks, in this process. Call it only in
    evodsp's own processes: a program that imports evodsp prints as it likes."""
    logging.setLogRecordFactory(_Record)
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given, **named: printable(format_warning(*given, **named))
    sys.excepthook = _traceback


def _traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


SECONDS_BETWEEN_LINES = 20.0


def duration(seconds: float) -> str:
    """Format seconds for people, in the largest unit that gives at least two: '95 s', '12 min', '3.4 h', and 'inf s'."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of further items, of `total`, that are finished. `done`: number finished in an
    earlier run.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(printable(what), total=total, completed=done)
            yield lambda more: bar.advance(task, more)
        return
    begun = last = time.monotonic()
    finished = done

    def advance(more: int) -> None:
        nonlocal finished, last
        finished += more
        now = time.monotonic()
        if now - last > SECONDS_BETWEEN_LINES:
            last = now
            left = (now - begun) / max(1, finished - done) * (total - finished)
            tell(f"{what}: {finished:,} of {total:,}, {duration(left)} left")

    yield advance
