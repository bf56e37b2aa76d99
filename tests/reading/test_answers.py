"""Answers of servers that do not keep to what a client expects: each is one line, in its time and at its size."""

from __future__ import annotations

import time
from base64 import b64encode
from urllib.error import HTTPError
from urllib.request import Request

import pytest

from evodsp.errors import UserError
from evodsp.reading import answers
from evodsp.reading.answers import BadAnswerError, SlowAnswerError, ask, check_address, content_of, without_login
from tests.builders.msa_server import Send, answer, raw_server


def read(address: str, seconds: float = 5.0, most: int = 1000, form: bytes | None = None) -> bytes:
    return content_of(address, ask(address, seconds, most, form=form), most)


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["first_line", "head", "content", "redirection", "continue"],
)
def test_a_server_that_sends_a_byte_at_a_time(begin: bytes) -> None:
    """Catches a limit of time that begins anew with every byte, in any part of an answer."""

    def slowly(first: str, head: str, send: Send) -> None:
        send(begin)
        for _ in range(300):
            send(b"HTTP/1.1 100 Continue\r\n\r\n" if b"100" in begin else b"H")
            time.sleep(0.01)

    begun = time.monotonic()
    with (
        raw_server(slowly) as address,
        pytest.raises(SlowAnswerError, match=r"has not sent its whole answer in 0\.15 s"),
    ):
        read(address, seconds=0.15)
    assert time.monotonic() - begun < 1.5


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\nabc"], ids=["nothing", "some"])
def test_a_server_that_falls_silent(begin: bytes) -> None:
    """Catches a limit that is looked at only when something arrives."""

    def stop(first: str, rest: str, send: Send) -> None:
        send(begin)
        time.sleep(1.0)

    begun = time.monotonic()
    with raw_server(stop) as address, pytest.raises((SlowAnswerError, TimeoutError)):
        read(address, seconds=0.15)
    assert time.monotonic() - begun < 0.9


def test_the_time_counts_over_redirections() -> None:
    """Catches a server that leads on and on, each time within the limit."""

    def on(first: str, head: str, send: Send) -> None:
        time.sleep(0.1)
        send(answer(b"", "302 Found", Location="/next"))

    with raw_server(on) as address, pytest.raises(SlowAnswerError):
        read(address, seconds=0.15)


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"],
    ids=["no_size", "size"],
)
def test_more_bytes_than_expected(head: bytes) -> None:
    """Catches an answer that fills the memory."""

    def send_much(first: str, given: str, send: Send) -> None:
        send(head)
        for _ in range(100):
            send(bytes(10_000))

    with (
        raw_server(send_much) as address,
        pytest.raises(BadAnswerError, match=f"{address} answers more than 1 MiB"),
    ):
        read(address)
    with raw_server(lambda first, rest, send: send(answer(bytes(1001)))) as address:
        assert read(address, most=1001) == bytes(1001)
        with pytest.raises(BadAnswerError, match="answers more than"):
            read(address, most=1000)


def test_what_comes_beside_the_content_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches chunks, or anything else of the protocol, that carry no content and never end."""
    monkeypatch.setattr(answers, "_HEAD", 2000)

    def send_chunks(first: str, given: str, send: Send) -> None:
        send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(500):
            send(b"1;" + b"x" * 1000 + b"\r\n \r\n")

    with raw_server(send_chunks) as address, pytest.raises(BadAnswerError, match="answers more than"):
        read(address)


def test_the_content_of_a_redirection_is_not_read() -> None:
    """Catches urllib, which reads it to its end, however long that is."""

    def on(first: str, head: str, send: Send) -> None:
        if "/there" in first:
            send(answer(b"found"))
        else:
            send(b"HTTP/1.1 302 Found\r\nLocation: /there\r\nContent-Length: 1000000000000\r\n\r\n" + bytes(1000))

    with raw_server(on) as address:
        assert read(f"{address}/x", seconds=2.0) == b"found"


@pytest.mark.parametrize(
    "place",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://[::1",
        "http://127.0.0.1:99999999/",
        "data:,x",
        "http://" + "a" * 70,
    ],
)
def test_redirections_to_bad_places(place: str) -> None:
    """Catches a tour through the disk of this machine, and tracebacks of addresses that are none."""
    with (
        raw_server(lambda first, head, send: send(answer(b"", "302 Found", Location=place))) as address,
        pytest.raises(BadAnswerError, match=r"leads to '.*', which is no address to follow|something that is not http"),
    ):
        read(address)


def test_no_redirection_leaves_https() -> None:
    """Catches an encrypted request that goes on in the clear."""
    with pytest.raises(BadAnswerError, match="no address to follow"):
        answers._redirected(Request("https://a.org/x"), "http://a.org/x")
    assert answers._redirected(Request("http://a.org/x"), "https://b.org/y").full_url == "https://b.org/y"


def test_redirections_end() -> None:
    """Catches a circle, and a server that never says where it ends."""
    asked = []

    def on(first: str, head: str, send: Send) -> None:
        asked.append(first)
        send(answer(b"", "302 Found", Location=f"/{len(asked)}"))

    with (
        raw_server(on) as address,
        pytest.raises(BadAnswerError, match="leads from one address to the next without an end"),
    ):
        read(address)
    assert len(asked) == 6


def test_a_form_is_sent_to_one_server_only() -> None:
    """Catches sequences that a server has sent on to another one."""
    asked = []

    def on(first: str, head: str, send: Send) -> None:
        asked.append((first, head))
        send(answer(b"", "307 Temporary Redirect", Location="/other") if len(asked) == 1 else answer(b"x"))

    with raw_server(on) as address, pytest.raises(HTTPError, match="307"):
        read(address, form=b"q=1")
    assert len(asked) == 1


def test_a_login_is_sent_to_its_server_only() -> None:
    """Catches a password that a redirection carries to another server, one that a request lacks, and one in a message."""
    heads: list[str] = []

    def on(first: str, head: str, send: Send) -> None:
        heads.append(head)
        send(answer(b"", "302 Found", Location="/there") if len(heads) == 1 else answer(b"found"))

    with raw_server(on) as address:
        mine = address.replace("http://", "http://me:p%40ss@")
        assert read(mine) == b"found"
        assert without_login(mine) == address
    assert f"Authorization: Basic {b64encode(b'me:p@ss').decode()}" in heads[0]
    assert "Authorization" not in heads[1]
    with (
        raw_server(lambda first, head, send: send(answer(bytes(5000)))) as address,
        pytest.raises(BadAnswerError, match="answers more than") as raised,
    ):
        read(address.replace("http://", "http://me:p%40ss@"))
    assert "p%40ss" not in str(raised.value)
    assert address in str(raised.value)


@pytest.mark.parametrize(
    "address",
    [
        "elsewhere", "", "file:///etc/passwd", "http://", "http://[::1", "http://host:99999", "http://host:port", "http://hö.de",
        "http://a b/",        "http://host/\n", "me:secret@host", "ftp://me:secret@host", "http://me:secret@host:port", "https://me:sec?ret@host",
        "https://host/?token=secret",        "https://me:secret@host/x#secret",
    ],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    """Catches a traceback in the middle of a run, and a message with the password."""
    with pytest.raises(
        UserError, match=r"^--url '.*' (is no address; give one that begins with https://|has something behind)"
    ) as raised:
        check_address("--url", address, "https://x.org")
    assert "sec" not in str(raised.value)


def test_addresses() -> None:
    """Catches an address of use that is refused."""
    for address in ("http://127.0.0.1:80", "https://me:secret@host/path/", "http://[::1]:8080/x", "https://me@host"):
        check_address("--url", address, "https://x.org")
