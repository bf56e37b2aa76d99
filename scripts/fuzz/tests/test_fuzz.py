"""The fuzz program: it finds what it says, a case is the same alone, and no reader does anything but return or say one line."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evodsp.errors import UserError
from scripts.fuzz import __main__ as fuzz
from scripts.fuzz.subjects import Subject


def _leaves(folder: Path) -> None:
    (folder / ".a.txt.1.partial").touch()


def _raises(error: Exception) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (lambda folder: None, None),
        (_raises(UserError("a.txt: one line")), None),
        (_raises(KeyError("x")), "KeyError at "),
        (_raises(RecursionError()), "RecursionError at "),
        (_raises(SystemExit(2)), "SystemExit at "),
        (lambda folder: logging.getLogger().error("two\nlines"), "message"),
        (lambda folder: bytearray(3 << 30), "MemoryError at "),
        (lambda folder: os.kill(os.getpid(), signal.SIGKILL), "ends the process (-9)"),
        (lambda folder: [time.process_time() for _ in iter(lambda: 0, 1)], "does not end"),
        (_leaves, "left behind"),
    ],
)
def test_what_is_a_fault(read: Callable[[Path], object], fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a program that passes whatever readers do, and one that ends with the first crash."""
    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    found = list(fuzz.try_cases([Subject("text", [{"a.txt": b"x\n"}], (read,))], seed=1, numbers=[4, 7]))
    assert [(number, name) for number, name, _ in found] == [(4, "text"), (7, "text")]
    for _, _, what in found:
        assert (what or "").startswith(fault or "")
        assert (what is None) == (fault is None)


def test_a_case_is_the_same_alone(tmp_path: Path) -> None:
    """Catches cases that depend on those before them, which nobody could look at again."""
    seen: dict[int, list[bytes]] = {}

    def keep(number: int) -> Callable[[Path], None]:
        return lambda folder: seen.setdefault(number, []).append((folder / "a.json").read_bytes())

    for numbers in (range(20), [13]):
        for number in numbers:
            subject = Subject("text", [{"a.json": b'{"a": [1, 2.5], "b": "x"}\n'}], (keep(number),))
            fuzz.try_case([subject], 3, number, tmp_path)
    assert seen[13][0] == seen[13][1]
    assert len({content[0] for content in seen.values()}) > 15


@pytest.mark.verify
def test_readers_return_or_say_one_line() -> None:
    """Catches, in a minute, what damaged and hostile files do to any reader."""
    assert fuzz.main(["--count", "1000000", "--seconds", "60", "--seed", str(time.time_ns())]) == 0
