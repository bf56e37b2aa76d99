"""Fetches files: what was begun is continued, what is damaged is fetched again, and a file appears only when it is whole.

The standard library downloads. fsspec's http, which evodsp has anyway, needs aiohttp and continues nothing; pooch does not
continue either. `evodsp.lock` keeps processes apart that fetch the same file.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from http.client import HTTPException
from io import BufferedIOBase
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from evodsp import __version__

ATTEMPTS = 4
TIMEOUT_S = 60.0
BLOCK = 1 << 20
PASSING = (URLError, HTTPException, TimeoutError, ConnectionError, SSLError)
"""Errors of a connection that another attempt may mend."""


def size_at(address: str) -> int | None:
    """The size in bytes of what is at an http address, if the server says it. Raises HTTPError and `PASSING`."""
    request = Request(address, headers={"User-Agent": f"evodsp/{__version__}"}, method="HEAD")
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        length = answer.headers.get("Content-Length")
    return int(length) if length else None


def opened(address: str, start: int = 0, end: int | None = None) -> tuple[BufferedIOBase, int]:
    """What is at an http address from byte `start` on (to `end`, exclusive), and where the answer begins.

    That is `start`, or 0 if the server sends whole files only. Raises HTTPError and `PASSING`.
    """
    headers = {"User-Agent": f"evodsp/{__version__}"}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    answer = urlopen(Request(address, headers=headers), timeout=TIMEOUT_S)
    return answer, start if answer.status == 206 else 0


def fetch_file(
    open_at: Callable[[int], tuple[BufferedIOBase, int]],
    target: Path,
    size: int | None = None,
    damage: Callable[[Path], str | None] = lambda path: None,
    advance: Callable[[int], object] = lambda more: None,
) -> str | None:
    """Fetch one file to `target`. Returns why that is impossible, or None.

    `open_at`: opens it at a position, and says where it begins, as `opened` does. `size`: in bytes, if known. `damage`: what is
    wrong with the file that was fetched, or None. `advance`: is told of every further byte; also of those that were there, and
    with a negative number of those that are lost.
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
            reason = str(error)
            if not isinstance(error, HTTPError) or error.code in (401, 403, 404, 410):
                return reason
            if error.code == 416:  # the partial file is longer than the whole one
                partial.unlink()
                advance(-before)
            continue
        except PASSING as error:
            reason = str(error)
            continue
        if size is not None and _size(partial) < size:  # the connection ended early
            reason = f"only {_size(partial):,} of {size:,} bytes arrived"
            continue
        wrong = _wrong_size(partial, size) or damage(partial)
        if wrong is None:
            partial.replace(target)
            return None
        reason = wrong
        advance(-_size(partial))
        partial.unlink()
    return reason


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
        while block := source.read(BLOCK):
            file.write(block)
            advance(len(block))


def _wrong_size(path: Path, size: int | None) -> str | None:
    found = _size(path)
    return None if size is None or found == size else f"has {found} bytes, not {size}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
