"""A server of alignments that sends what none would: it costs the record that it is sent for, in its time and at its size."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tarfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evodsp.data.records import ProteinSequence
from evodsp.errors import SettingError, UserError
from evodsp.reading.answers import BadAnswerError
from evodsp.search import server as archive
from evodsp.search.config import SearchConfig, ServerLimits
from evodsp.search.searcher import Found, NoAnswerError, Say, Searcher, search
from evodsp.search.server import MsaServer, split
from tests.builders.msa_server import alignments
from tests.builders.raw_server import Send, answer, raw_server

LETTERS = "MKTAYIAK"
GOOD = alignments([LETTERS], "x")
PLACE = "http://host"
STATE = b'{"status": "COMPLETE", "id": "a"}'


def entry(
    name: str = "uniref.a3m", size: int | None = None, kind: bytes = tarfile.REGTYPE, content: bytes = GOOD
) -> bytes:
    """A file of a tar archive, or what looks like one. `size`: other than that of the content."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size is not None:
        block[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 2**88).to_bytes(11, "big")
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + content + bytes(-len(content) % 512)


def packed(*entries: bytes) -> bytes:
    return gzip.compress(b"".join(entries) + bytes(1024), 1)


def sparse(size: int) -> bytes:
    """A sparse file, in the form of extended headers, with 4 bytes in it."""
    form = {"major": "1", "minor": "0", "name": "uniref.a3m", "realsize": str(size)}
    info, content = tarfile.TarInfo("GNUSparseFile.0/uniref.a3m"), b"1\n0\n4\n".ljust(512, b"\0") + b">101"
    info.size, info.pax_headers = len(content), {f"GNU.sparse.{name}": value for name, value in form.items()}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", format=tarfile.PAX_FORMAT) as opened:
        opened.addfile(info, io.BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (packed(entry(content=bytes(2 << 20)), entry()), r"more than 1 MiB \(--msa_server_limits\.answer_mib\)$"),
        (packed(entry("other.bin", content=bytes(2 << 20)), entry()), r"more than 1 MiB \(--msa_server_limits\.answer_mib\)$"),
        (packed(entry("x", kind=b"x", content=bytes(2 << 20)), entry()), r"than 1 MiB \(--msa_server_limits\.answer_mib\)$"),
        (packed(entry(size=-512), entry()), "a file of -512 bytes"),
        (packed(entry(size=2**80), entry()), "a file of 1208925819614629174706176 bytes"),
        (sparse(900 << 20), "does not begin with the number"),
        (packed(entry(content=b">" + b"1" * 5000 + b"\nAAA\n")), "does not begin with the number"),
        (packed(entry(content=b">999\nAAA\n")), "the record 999, which was not asked for"),
        (packed(*(entry(f"{number}.a3m") for number in range(101))), "more than 100 alignment files"),
        (packed(entry())[:-20], "broken gzip archive"),
        (b"\x1b[31mred\x1b]0;owned\x07", "not gzipped"),
        (gzip.compress(b"\x1b[31mred" * 100), "no gzipped tar archive"),
    ],
    ids=[
        "zeros", "beside", "extended_header", "negative", "huge", "sparse", "long_number", "other_number", "many", "cut",
        "text", "gzipped_text",
    ],
)  # fmt: skip
def test_an_archive_that_is_none(sent: bytes, words: str) -> None:
    """Catches gigabytes of zeros, of headers and of members beside the alignments, a tour without end over a negative size,
    and tracebacks of the libraries that read archives."""
    with pytest.raises(BadAnswerError, match=words) as raised:
        split(sent, 1, 1 << 20, PLACE)
    assert str(raised.value).startswith(PLACE)
    assert len(str(raised.value)) < 250
    assert "\x1b" not in str(raised.value)


def test_what_an_archive_may_hold_beside_alignments() -> None:
    """Catches extended headers, links, folders and odd names that cost the alignments, or are taken for some."""
    deep = [entry("x", kind=b"x", content=b"9 a=b\n") for _ in range(3000)]  # each header extends the next one
    links = [
        entry("l.a3m", kind=kind) for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, b"S", b"L", b"Z")
    ]
    names = [entry(name) for name in ("é.a3m", "a" * 95 + "\x1b.a3m", "..a3m", "notes.txt", "../../up.a3m")]
    (found,) = split(packed(*deep, *links, *names, entry()), 1, 8 << 20, PLACE)
    assert found.files == dict.fromkeys(("up.a3m", "uniref.a3m"), GOOD.rstrip(b"\0"))


def test_zeros_between_alignments_take_no_memory() -> None:
    """Catches an alignment for each of a million zero bytes."""
    content = bytes(1_000_000) + GOOD + bytes(1_000_000)
    tracemalloc.start()
    found = list(archive._records(content, "uniref.a3m", PLACE))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(0, GOOD.rstrip(b"\0"))]
    assert most < 1e6, "a list of the pieces would take 8 bytes for each zero"


@pytest.mark.parametrize(
    "sent",
    [b"[" * 100_000, b'{"status":"COMPLETE","id":' + b"9" * 5000 + b"}", b'{"status":"COMPLETE","id":"a/../b"}',
     '{"status":"COMPLETE","id":"é"}'.encode(), b'{"status":7,"id":"a"}', b"[]", b"\x1b[2J\x1b[31mhello\x1b]0;owned\x07"],
    ids=["deep", "long_number", "path", "letter", "no_word", "list", "escapes"],
)  # fmt: skip
def test_an_answer_that_is_no_status(sent: bytes) -> None:
    """Catches tracebacks of JSON, ids that lead to other addresses, and answers that act on the terminal."""
    with (
        raw_server(lambda first, head, send: send(answer(sent))) as address,
        pytest.raises(BadAnswerError, match=r"answers '.*', which is not ColabFold's protocol") as raised,
    ):
        MsaServer(address).search([LETTERS], print)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "status", ["\x1b[31mEVIL\x1b]0;owned\x07\u202e", "\ud800", "no\nevodsp: error: all is lost" + "x" * 10**5]
)
def test_words_of_the_server_are_quoted(status: str, tmp_path: Path) -> None:
    """Catches a status that acts on the terminal, that no file can hold, that looks like a message of ours, or fills it."""
    with raw_server(
        lambda first, head, send: send(answer(json.dumps({"status": status, "id": "a"}).encode()))
    ) as address:
        found = dict(search([ProteinSequence("a", LETTERS)], tmp_path, MsaServer(address), lambda line: None))
    reason = str(found["a"])
    assert "could not search this sequence" in reason
    assert reason.isprintable()
    assert len(reason) < 250


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("864000", "240.0 h"), ("9" * 400, "277777.8 h"), ("-5", ""), ("²", ""), ("Fri, 31 Dec 9999 23:59:59 GMT", ""),
    ],
)  # fmt: skip
def test_a_server_that_asks_to_wait(wanted: str, words: str) -> None:
    """Catches days of sleep, and a traceback of time.sleep, at the word of a server."""
    rests: list[float] = []
    with (
        raw_server(lambda first, head, send: send(answer(b"", "503 Busy", Retry_After=wanted))) as address,
        pytest.raises(
            NoAnswerError, match=f"503 Busy; to ask again in {words} would be later" if words else "503 Busy; check"
        ),
    ):
        MsaServer(address, sleep=rests.append).search([LETTERS], lambda line: None)
    assert sum(rests) == 0 if words else 75 <= sum(rests) <= 113


def test_all_pauses_end_with_the_search() -> None:
    """Catches a search that each of its pauses makes longer than it may be."""
    clock = [0.0]

    def rest(seconds: float) -> None:
        clock[0] += seconds

    def refuse(first: str, head: str, send: Send) -> None:
        send(answer(b"", "503 Busy", Retry_After="40"))

    with (
        raw_server(refuse) as address,
        pytest.raises(NoAnswerError, match="later than the 100 s that a search may take"),
    ):
        MsaServer(address, ServerLimits(search_s=100.0), rest, lambda: clock[0]).search([LETTERS], lambda line: None)
    assert clock[0] <= 100


def test_the_limits_of_an_answer() -> None:
    """Catches an answer of hours, a byte at a time, a status of gigabytes, and an archive above the limit. (How an answer is
    limited: tests/reading/test_answers.py.)"""

    def serve(first: str, head: str, send: Send) -> None:
        if "POST" in first and "long" not in first:
            send(answer(STATE))
            return
        send(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(200):
            send(b" " if "slow" in first else bytes(1 << 16))
            time.sleep(0.01 if "slow" in first else 0)

    with raw_server(serve) as address:
        for place in (address, f"{address}/long"):
            with pytest.raises(BadAnswerError, match="answers more than 1 MiB"):
                MsaServer(place, ServerLimits(answer_mib=1)).search([LETTERS], lambda line: None)
        server = MsaServer(f"{address}/slow", ServerLimits(answer_s=0.1), sleep=lambda seconds: None)
        with pytest.raises(NoAnswerError, match=r"its whole answer in 0.1 s \(--msa_server_limits.answer_s\)"):
            server.search([LETTERS], lambda line: None)


@pytest.mark.parametrize(
    "bad",
    [
        answer(b"", "302 Found", Location="http://[::1"),
        answer(b"", "404 \x1b[31mred"),
        answer(b"", "413 Too Large"),
        answer(b"[" * 10_000),
        b"FOO BAR BAZ\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 200 + b"\r\n",
    ],
    ids=["redirection", "404", "413", "json", "no_http", "cut", "heads"],
)
def test_a_bad_answer_costs_one_record(bad: bytes, tmp_path: Path) -> None:
    """Catches a server that ends the search of all records because of what it says of one."""

    def refuse_one(first: str, rest: str, send: Send) -> None:
        if LETTERS in rest:
            send(bad)
        elif first.startswith("POST"):
            send(answer(STATE))
        else:
            send(answer(packed(entry(content=b">101\nGSTLLK\n\0"))))

    records = [ProteinSequence("wrong", LETTERS), ProteinSequence("right", "GSTLLK")]
    with raw_server(refuse_one) as address:
        server = MsaServer(address, sleep=lambda seconds: None)
        found = dict(search(records, tmp_path, server, lambda line: None))
    assert str(found["wrong"]).startswith(f"wrong: {address}")
    assert found["right"] is None
    assert (tmp_path / "right" / "uniref.a3m").is_file()


class Uneven(Searcher):
    """Answers by what a sequence begins with: D is badly, G is well. `asked`: the sequences, one at a time."""

    origin: dict[str, str] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[str] = []

    def announcement(self, sequences: int) -> str:
        return ""

    def search(self, sequences: Sequence[str], say: Say) -> list[Found]:
        self.asked += sequences
        if sequences[0].startswith("D"):
            raise BadAnswerError("no status")
        return [Found({"x.a3m": f">q\n{letters}\n".encode()}) for letters in sequences]


def test_a_server_without_a_good_answer_is_left_alone(tmp_path: Path) -> None:
    """Catches thousands of requests to an address of something else, and a limit that good answers do not begin anew."""
    given = ["DA", "DC", "DE", "DF", "GA", "DG", "DH", "DI", "DK", "DL", "DM", "GC"]
    searcher, failed = Uneven(), []
    found = search([ProteinSequence(name, name) for name in given], tmp_path, searcher, lambda line: None)
    failed += [name for name, error in itertools.islice(found, 10) if error is not None]
    with pytest.raises(NoAnswerError, match=r"no status\. So it was 5 times in a row; nothing more is asked"):
        next(found)
    assert searcher.asked == given[:10]
    assert failed == [name for name in given[:10] if name != "GA"]
    assert (tmp_path / "GA" / "x.a3m").is_file()


def test_no_password_is_kept_or_said(tmp_path: Path) -> None:
    """Catches the password of an address in the announcement, in the file of origin, and in an error."""
    heads: list[str] = []

    def serve(first: str, rest: str, send: Send) -> None:
        heads.append(rest)
        send(answer(STATE) if first.startswith("POST") else answer(packed(entry())))

    said: list[str] = []
    with raw_server(serve) as address:
        with_login = address.replace("http://", "http://me:secret@")
        assert dict(search([ProteinSequence("a", LETTERS)], tmp_path, MsaServer(with_login), said.append)) == {
            "a": None
        }
    assert all("Authorization: Basic bWU6c2VjcmV0" in head for head in heads)
    assert json.loads((tmp_path / "a" / "search.json").read_text())["server"] == address
    with pytest.raises(NoAnswerError) as raised:
        MsaServer("http://me:secret@127.0.0.1:1", sleep=lambda seconds: None).search([LETTERS], said.append)
    assert "secret" not in str(raised.value)
    assert said
    assert not any("secret" in line for line in said)
    for words in ({"msa_server": "me:secret@host"}, {"msa_server": "https://host/?key=secret"}):
        with pytest.raises(UserError) as refused:
            SearchConfig(inputs=[tmp_path], output=tmp_path, **words)  # type: ignore[arg-type]
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["search_s", "answer_s", "answer_mib"])
def test_limits_are_checked(name: str) -> None:
    """Catches a limit of nothing, and one without an end."""
    with pytest.raises(SettingError, match=f"--msa_server_limits.{name} is -"):
        replace(ServerLimits(), **{name: -getattr(ServerLimits(), name)})
