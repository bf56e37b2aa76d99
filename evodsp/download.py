"""Fetches files. An interrupted download is continued, a damaged file is fetched again, and a file appears only when it is
whole.

Downloads use the standard library (`evodsp.reading.answers`). pooch (1.9) fetches whole files only, of 5 GB for one model,
and starts again after an interruption; huggingface_hub (2.4: 19 MB with hf_xet) continues, but reads its own hub only;
fsspec's http has no time limit for a whole answer, and follows redirections from https to http. `evodsp.lock` prevents two
processes from fetching the same file.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from http.client import HTTPResponse, IncompleteRead
from io import BufferedIOBase
from pathlib import Path
from urllib.error import HTTPError

from evodsp.reading.answers import PASSING, BadAnswerError, SlowAnswerError, ask, usable
from evodsp.reading.quoting import quoted

ATTEMPTS = 4
BLOCK = 1 << 20
FILE_S = 6 * 3600.0
"""Default time limit of a file in seconds."""
LARGEST = 1 << 36
"""Largest number of bytes of a file whose size is not known: 64 GiB."""
_HEAD_S = 120.0
_DIGITS = 15
"""Largest number of digits of a plausible size in bytes."""


def size_at(address: str) -> int | None:
    """The size in bytes of the file at an http address, if the server gives it. Raises the errors of
    `evodsp.reading.answers.ask`.
    """
    with ask(address, _HEAD_S, 0, method="HEAD") as answer:
        length = answer.headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) <= _DIGITS else None


def opened(
    address: str, start: int = 0, end: int | None = None, seconds: float = FILE_S, most: int = LARGEST
) -> tuple[HTTPResponse, int]:
    """The content of an http address from byte `start` on (to `end`, exclusive), and the byte at which it begins.

    It begins at `start`, or at 0 if the server sends whole files only. `seconds`: time limit for the whole answer. `most`:
    largest number of bytes. Raises the errors of `evodsp.reading.answers.ask`, also when the answer is read.
    """
    headers = {}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    answer = ask(address, seconds, most, headers)
    return answer, start if answer.status == 206 else 0


def fetch_file(
    open_at: Callable[[int], tuple[BufferedIOBase, int]],
    target: Path,
    size: int | None = None,
    damage: Callable[[Path], str | None] = lambda path: None,
    advance: Callable[[int], object] = lambda more: None,
) -> str | None:
    """Fetch one file to `target`. Returns the reason for a failure, or None.

    `open_at`: function that opens the file at a position and returns the position at which it begins, like `opened`.
    `size`: size in bytes, if known. `damage`: function that returns the defect of a fetched file, or None. `advance`:
    function that takes the number of further bytes, including those of an earlier download; a negative number for lost
    bytes.
    """
    partial = target.with_name(f".{target.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    reason = ""
    advance(_size(partial))
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2.0**attempt / 2)
        before = _size(partial)
        try:
            _append(open_at, partial, size, advance)
        except (HTTPError, FileNotFoundError) as error:
            reason = quoted(str(error))
            if not isinstance(error, HTTPError) or error.code in (401, 403, 404, 410):
                return reason
            if error.code == 416:  # the partial file is longer than the whole one
                _forget(partial, advance)
            continue
        except SlowAnswerError as error:
            return str(error)
        except BadAnswerError as error:
            if _size(partial) != before:  # the next fetch would go on behind it
                _forget(partial, advance)
            return str(error)
        except PASSING as error:
            reason = quoted(str(getattr(error, "reason", error)))
            continue
        if size is not None and _size(partial) < size:  # the connection ended early
            reason = f"only {_size(partial):,} of {size:,} bytes arrived"
            continue
        wrong = _wrong_size(partial, size) or damage(partial)
        if wrong is None:
            partial.replace(target)
            return None
        reason = wrong
        _forget(partial, advance)
    return reason


def _forget(partial: Path, advance: Callable[[int], object]) -> None:
    advance(-_size(partial))
    partial.unlink(missing_ok=True)


def _append(
    open_at: Callable[[int], tuple[BufferedIOBase, int]],
    partial: Path,
    size: int | None,
    advance: Callable[[int], object],
) -> None:
    start = _size(partial)
    if start and start == size:
        return
    source, begin = open_at(start)
    advance(begin - start)
    with source, partial.open("r+b" if begin else "wb") as file:
        file.seek(begin)
        while block := _read(source):
            file.write(block)
            advance(len(block))
    if size is None and (missing := getattr(source, "length", None)):
        raise IncompleteRead(b"", missing)


def _read(source: BufferedIOBase) -> bytes:
    with usable("it"):
        return source.read(BLOCK)


def _wrong_size(path: Path, size: int | None) -> str | None:
    found = _size(path)
    return None if size is None or found == size else f"has {found} bytes, not {size}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
