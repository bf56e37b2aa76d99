"""Prints and logs everything that evodsp writes, so that foreign text is shown without acting on the terminal
(`evodsp.reading.quoting`).
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType

from evodsp.reading.quoting import printable


def write_line(write: Callable[[str], object], text: str) -> None:
    """Give a line, or several, to the method of a file that people read."""
    write(f"{printable(text)}\n")


def counted(number: int, noun: str) -> str:
    """For example '1 seed', '1,200 residues' or '2 batches'."""
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
