"""Answers of servers by http, which end in a given time and at a given size whatever a server sends; and files that are
fetched.

The standard library's limit of time is one for each receiving from the network: a server that sends a byte a minute is never
too slow for it. It reads what comes with a redirection to its end, however much that is, follows it to any place, and takes
a user name in an address for a port. All of this is mended here. Errors that are not those of a connection are one line.

An interrupted download is continued, a damaged file is fetched again, and a file appears only when it is whole. Downloads
use the standard library. pooch (1.9) fetches whole files only, of 5 GB for one model, and starts
again after an interruption; huggingface_hub (2.4: 19 MB with hf_xet) continues, but reads its own hub only; fsspec's http
has no time limit for a whole answer, and follows redirections from https to http. `evodsp.files` prevents two processes from
fetching the same file.
"""

from __future__ import annotations

import io
import shutil
import ssl
import string
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead, InvalidURL
from io import BufferedIOBase
from pathlib import Path
from socket import socket
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from evodsp.errors import UserError
from evodsp.printing import quoted
from evodsp.version import __version__

SILENT_S = 60.0
"""Longest time in which nothing arrives. A further attempt may mend it."""
PASSING = (URLError, HTTPException, TimeoutError, ConnectionError, ssl.SSLError)
"""Errors of a connection that another attempt may mend."""
MOST_REDIRECTIONS = 5
_REDIRECTED = (301, 302, 303, 307, 308)
_BLOCK = 1 << 20
_HEAD = 1 << 17
"""Bytes of an answer before its content: http.client takes at most 101 lines, but any number of answers '100 Continue'."""
_SCHEMES = ("http", "https")


class BadAnswerError(UserError):
    """An answer that is of no use, and would not be if it were asked for again."""


class SlowAnswerError(BadAnswerError):
    """An answer that has not ended in its time."""


def check_address(option: str, address: str, such_as: str) -> None:
    """Raise UserError unless `address` is that of a server or a folder of one, which a path can be added to. A user name and a
    password in it are not shown."""
    shown = address.rpartition("@")[2]
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if (
        host is None
        or parts.scheme not in _SCHEMES
        or not address.isascii()
        or not address.isprintable()
        or " " in address
    ):
        raise UserError(
            f"{option} '{quoted(shown)}' is no address; give one that begins with https://, such as {such_as}"
        )
    if parts.query or parts.fragment:
        shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        raise UserError(
            f"{option} '{quoted(shown)}' has something behind a '?' or '#', but paths are added to it; leave that "
            "out (a name and a password go before the host: https://name:password@host)"
        )


def without_login(address: str) -> str:
    """The address without a user name and password."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def ask(
    address: str,
    seconds: float,
    most: int,
    headers: Mapping[str, str] | None = None,
    form: bytes | None = None,
    method: str | None = None,
) -> HTTPResponse:
    """Opened answer of a server. Redirections are followed to other http addresses, and from https to https only.

    `seconds`: in which the answer has to arrive, to its last byte. `most`: bytes of its content. Reading raises BadAnswerError
    beyond them (use `content_of`, or `usable` around it). A user name and password in the address are sent to its server only.
    Raises HTTPError, `PASSING` and BadAnswerError.
    """
    deadline = time.monotonic() + seconds
    opener = _opener(deadline, seconds, most + _HEAD)
    given = {"User-Agent": f"evodsp/{__version__}", **(headers or {})}
    with usable(address):
        request = Request(without_login(address), data=form, headers=given, method=method)
        if login := _login(address):
            request.add_unredirected_header("Authorization", login)
        for redirected in range(MOST_REDIRECTIONS + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _too_slow(seconds)
            try:
                answer: HTTPResponse = opener.open(request, timeout=min(SILENT_S, left))
                return answer
            except HTTPError as error:
                error.close()
                place = error.headers.get("Location")
                posted_again = form is not None and error.code in (307, 308)
                if error.code not in _REDIRECTED or place is None or posted_again:
                    raise
                request = _redirected(request, place)
            except URLError as error:
                if not redirected:
                    raise
                raise HTTPException(
                    f"leads to {quoted(request.host)}, where nobody answers ({error.reason})"
                ) from error
        raise BadAnswerError("leads from one address to the next without an end")


def content_of(address: str, answer: HTTPResponse, most: int) -> bytes:
    """The content of the answer of an address, of at most `most` bytes. Raises as `ask` does."""
    with usable(address), answer:
        blocks, size = [], 0
        while block := answer.read(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > most:
                raise _too_large(most)
        if answer.length:  # http.client tells only who reads without a size
            raise IncompleteRead(b"", answer.length)
        return b"".join(blocks)


@contextmanager
def usable(address: str) -> Iterator[None]:
    """Around the reading of an answer: turn whatever the standard library raises for a wrong one into BadAnswerError."""
    where = without_login(address)
    try:
        yield
    except BadAnswerError as error:
        raise type(error)(f"{where} {error}") from error
    except (InvalidURL, ValueError, OverflowError, MemoryError) as error:
        raise BadAnswerError(f"{where} answers something that is not http ({quoted(error)})") from error


def _too_slow(seconds: float) -> SlowAnswerError:
    return SlowAnswerError(f"has not sent its whole answer in {seconds:.3g} s")


def _too_large(most: int) -> BadAnswerError:
    return BadAnswerError(f"answers more than {max(1, round(most / 2**20)):,} MiB")


def _login(address: str) -> str:
    login, at, _ = urlsplit(address).netloc.rpartition("@")
    name, _, password = login.partition(":")
    return f"Basic {b64encode(f'{unquote(name)}:{unquote(password)}'.encode()).decode()}" if at else ""


def _redirected(request: Request, place: str) -> Request:
    """The request for another address. Like a browser's, it is a GET where a form was sent."""
    try:
        address = urljoin(request.full_url, quote(place, safe=string.punctuation))
        scheme, host, _ = urlsplit(address).scheme, urlsplit(address).hostname, urlsplit(address).port
    except ValueError:
        scheme, host = "", None
    secure = scheme == "https" or urlsplit(request.full_url).scheme != "https"
    if scheme not in _SCHEMES or not host or not secure:
        raise BadAnswerError(f"leads to '{quoted(place)}', which is no address to follow")
    kept = {
        name: value for name, value in request.headers.items() if name.lower() not in ("content-length", "content-type")
    }
    method = "HEAD" if request.get_method() == "HEAD" else "GET"
    return Request(without_login(address), headers=kept, method=method)


def _opener(deadline: float, seconds: float, most: int) -> OpenerDirector:
    """Opener of requests. Proxies of the environment are used as everywhere in Python."""

    def connection(kind: type[HTTPConnection], *given: Any, **named: Any) -> HTTPConnection:
        made = kind(*given, **named)
        made.response_class = partial(_Answer, deadline=deadline, seconds=seconds, most=most)  # type: ignore[assignment]
        return made

    class Plain(HTTPHandler):
        def http_open(self, req: Request) -> HTTPResponse:
            return self.do_open(partial(connection, HTTPConnection), req)

    class Secure(HTTPSHandler):
        def https_open(self, req: Request) -> HTTPResponse:
            return self.do_open(partial(connection, HTTPSConnection), req)

    return build_opener(Plain, Secure, _NotFollowed)


class _NotFollowed(HTTPRedirectHandler):
    """Makes an HTTPError of a redirection, as of any other answer without content."""

    def http_error_302(self, *_: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # type: ignore[assignment]


class _Answer(HTTPResponse):
    """An answer whose bytes are counted, and which ends at a moment."""

    def __init__(self, sock: socket, *given: Any, deadline: float, seconds: float, most: int, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Limited(sock, deadline, seconds, most))


class _Limited(io.RawIOBase):
    """Stream from the network, until a moment and up to a number of bytes."""

    def __init__(self, sock: socket, deadline: float, seconds: float, most: int) -> None:
        self._socket, self._bytes = sock, sock.makefile("rb", buffering=0)
        self._deadline, self._seconds, self._most, self._left = deadline, seconds, most - _HEAD, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise _too_slow(self._seconds)
        if self._left <= 0:
            raise _too_large(self._most)
        self._socket.settimeout(min(SILENT_S, left))
        try:
            count: int | None = self._bytes.readinto(buffer)
        except TimeoutError:
            if time.monotonic() >= self._deadline:
                raise _too_slow(self._seconds) from None
            raise
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._bytes.close()
        super().close()


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
