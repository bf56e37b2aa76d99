"""The client of ColabFold's protocol against a stand-in on this machine, and against a server that sends what none would."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import tarfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import SettingError, UserError
from evodsp.reading.answers import BadAnswerError
from evodsp.search import server as archive
from evodsp.search.config import SearchConfig, ServerLimits
from evodsp.search.searcher import Found, NoAnswerError, Say, Searcher, search
from evodsp.search.server import MsaServer, NotPairedError, split
from tests.builders.msa_server import FILES, Send, StandIn, alignments, answer, hit_table, packed, raw_server, serving

RECORDS = [ProteinSequence(name, letters) for name, letters in (("a", "MKTAYIAK"), ("b", "GSTLLK"), ("c", "MKTAYIAK"))]


class Rests(list[float]):
    """The seconds that the client would have waited."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def address(stand_in: StandIn) -> Iterator[str]:
    with serving(stand_in) as found:
        yield found


def run(address: str, folder: Path, said: list[str] | None = None) -> dict[str, str | None]:
    """Search `RECORDS`; what became of each."""
    lines = [] if said is None else said
    found = search(RECORDS, folder, MsaServer(address, sleep=Rests()), lines.append)
    return {name: None if error is None else str(error) for name, error in found}


def test_alignments_are_kept_and_not_asked_for_again(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches alignments given to another record, one sequence asked for twice, and a second search of what is there."""
    stand_in.states, said = ["PENDING", "RUNNING", "RUNNING"], []
    assert run(address, tmp_path / "kept", said) == {"a": None, "b": None, "c": None}
    assert stand_in.asked == [["MKTAYIAK", "GSTLLK"]]
    assert "2 sequences will be sent to" in said[0]
    assert address in said[0]
    assert next(iter(stand_in.agents)).startswith("evodsp/")
    for record in RECORDS:
        found = read_alignment_dir(tmp_path / "kept" / record.name, record)
        assert [len(alignment.names) for alignment in found] == [3, 3]
        assert found[0].deletions[1, 3] == 2
    assert json.loads((tmp_path / "kept" / "a" / "search.json").read_text())["server"] == address
    again: list[str] = []
    assert run(address, tmp_path / "kept", again) == {"a": None, "b": None, "c": None}
    assert len(stand_in.asked) == 1
    assert not again


@pytest.mark.parametrize(
    ("server", "open_to_all"),
    [("http://msa.example.org/api", True), ("https://msa.example.org", False), ("http://localhost:8080", False)],
)
def test_sequences_that_anyone_can_read_on_the_way(server: str, open_to_all: bool) -> None:
    """Catches sequences sent without encryption and without a word."""
    assert ("http is not encrypted" in MsaServer(server).announcement(1)) == open_to_all


def test_a_busy_server_is_asked_again_later(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches a client that hammers a server which refuses it, or gives up at the first refusal."""
    stand_in.refusals, stand_in.broken = ["RATELIMIT", "UNKNOWN", "RATELIMIT"], [503, 429]
    rests, said = Rests(), []
    list(search(RECORDS, tmp_path, MsaServer(address, sleep=rests), said.append))
    assert (tmp_path / "b" / FILES[0]).is_file()
    # Two errors of HTTP, three refusals and one look at the ticket: each wait is up to half as long again, at random.
    for rest, least in zip(rests, [5, 10, 5, 10, 20, 5], strict=True):
        assert least <= rest <= 1.5 * least
    assert sum("asked too often" in line for line in said) == 3
    assert sum("does not answer (503 " in line or "does not answer (429 " in line for line in said) == 2


def test_one_sequence_that_fails_costs_no_other(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches a ticket of several sequences that is given up for one of them."""
    stand_in.never = {"GSTLLK"}
    found = run(address, tmp_path)
    assert (found["a"], found["c"]) == (None, None)
    assert found["b"] is not None
    assert found["b"].startswith(f"b: {address} could not search this sequence (ERROR)")
    assert not (tmp_path / "b").exists()
    assert stand_in.asked == [["MKTAYIAK", "GSTLLK"], ["MKTAYIAK"], ["GSTLLK"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"states": ["MAINTENANCE"]}, "is under maintenance"),
        ({"refusals": ["RATELIMIT"] * 500}, "has refused a search for 10 min"),
        ({"states": ["RUNNING"] * 100_000}, "has not finished a search in"),
        ({"broken": [500] * 5}, "ticket/msa: 500 Internal Server Error"),
    ],
    ids=["maintenance", "refused", "never_done", "down"],
)
def test_a_server_that_does_not_answer_ends_the_search(
    stand_in: StandIn,
    address: str,
    tmp_path: Path,
    change: dict[str, list[object]],
    words: str,
) -> None:
    """Catches hours of waiting for each of many records, and endless loops."""
    clock = [0.0]

    def rest(seconds: float) -> None:
        clock[0] += seconds

    for name, value in change.items():
        setattr(stand_in, name, value)
    server = MsaServer(address, ServerLimits(search_s=600.0), sleep=rest, clock=lambda: clock[0])
    found = search(RECORDS[:1], tmp_path, server, lambda line: None)
    with pytest.raises(NoAnswerError, match=words):
        list(found)
    assert not any(tmp_path.iterdir())


QUERY = ["MKTAYIAK", "GSTLLK"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"uniref.a3m": b">101\nMKTAYIAV\n\0>102\nGSTLLK\n\0"}, "has 'V' at position 8, the query"),
        ({"uniref.a3m": b">101\nMKTAYIAK\n\0"}, "no alignment in the answer"),
        ({"uniref.a3m": b">101\nMKTAYIAK\n>x\nMKTA\n\0>102\nGSTLLK\n\0"}, "columns"),
        ({"notes.txt": b"none"}, "no alignment in the answer"),
    ],
    ids=["other_sequence", "one_of_two", "uneven", "no_file"],
)
def test_a_wrong_answer_is_not_kept(
    stand_in: StandIn, address: str, tmp_path: Path, members: dict[str, bytes], words: str
) -> None:
    """Catches alignments of other sequences, and answers that are taken apart wrongly, among a user's data."""
    stand_in.members = members
    reasons = [reason for reason in run(address, tmp_path).values() if reason]
    assert any(words in reason for reason in reasons)
    for record in RECORDS:
        if (tmp_path / record.name).exists():
            assert len(read_alignment_dir(tmp_path / record.name, record)) == 1


ALONE = {
    "uniref.a3m": b">101\nMKTAYIAK\n\0>102\nGSTLLK\n\0",
    "bfd.a3m": b">101\nMKTAYIAK\n>x\nMKTAYIAK\n\0>102\nGSTLLK\n\0",
}


def test_an_answer_of_the_query_alone_is_said_and_asked_for_again(
    stand_in: StandIn, address: str, tmp_path: Path
) -> None:
    """Catches a passing fault of a server that stands for ever as 'there is no related sequence', and in silence."""
    stand_in.members, said = ALONE, []
    assert run(address, tmp_path, said) == {"a": None, "b": None, "c": None}
    assert said[1].startswith(
        "no related sequence was found for 3 records (a, c, b): a server may find some when it is"
    )
    stand_in.members = None
    assert run(address, tmp_path) == {"a": None, "b": None, "c": None}
    assert len(stand_in.asked) == 1  # a day has not passed
    os.utime(tmp_path / "b" / "search.json", (0, 0))
    assert run(address, tmp_path) == {"a": None, "b": None, "c": None}
    assert stand_in.asked[1:] == [["GSTLLK"]]
    list(search(RECORDS, tmp_path, MsaServer(address, sleep=Rests()), said.append, retry=True))
    assert stand_in.asked[2:] == [["MKTAYIAK"]]  # that of b is a full one by now
    assert all(len(read_alignment_dir(tmp_path / record.name, record)[0]) == 3 for record in RECORDS)


def test_asking_again_in_vain_costs_nothing(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches a record that fails, or loses its alignment, because a server which is asked again does not know its sequence."""
    stand_in.members = ALONE
    run(address, tmp_path)
    stand_in.never, said = {"MKTAYIAK"}, []
    found = dict(search(RECORDS[:1], tmp_path, MsaServer(address, sleep=Rests()), said.append, retry=True))
    assert found == {"a": None}
    assert said[-1].endswith("its earlier alignment stays")
    assert (tmp_path / "a" / "bfd.a3m").is_file()


def paired(address: str, folder: Path) -> str:
    MsaServer(address, sleep=Rests()).keep_pairs(QUERY, folder, lambda line: None)
    return (folder / "pair.a3m").read_text()


def test_paired_rows_stand_beside_one_another(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches rows of different species that are joined, and letters of a row that come to the partner."""
    stand_in.pairs = (
        b">101\nMKTAYIAK\n>a\tcow\nMKTAgg\nYIAV\n>b\n--------\n\0>102\nGSTLLK\n>c\tcow\nGSTLLV\n>d\nGSTL--\n\0"
    )
    rows = "#8,6\t1,1\n>101\t102\nMKTAYIAKGSTLLK\n>a\tcow\tc\tcow\nMKTAggYIAVGSTLLV\n>b\td\n--------GSTL--\n"
    assert paired(address, tmp_path / "x_paired") == rows
    assert stand_in.paired == [QUERY]
    assert json.loads((tmp_path / "x_paired" / "search.json").read_text())["mode"] == "pairgreedy"


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (b">101\nMKTAYIAK\n>a\nMKTAYIAK\n\0>102\nGSTLLK\n\0", "pair.a3m holds 2, 1 rows"),
        (b">101\nMKTAYIAK\n\0", "no pair.a3m of sequence 102"),
        (b"\0", "no pair.a3m of sequence 101"),
        (b">101\nMKTAYIAV\n\0>102\nGSTLLK\n\0", "has 'V' at position 8"),
        (b">101\nMKTAYIAK\n>a\nMKTA\n\0>102\nGSTLLK\n>b\nGSTLLK\n\0", "columns"),
    ],
    ids=["uneven", "one_of_two", "none", "other_sequence", "short_row"],
)
def test_rows_that_are_no_pairs_are_not_kept(
    stand_in: StandIn, address: str, tmp_path: Path, pairs: bytes, words: str
) -> None:
    """Catches rows of a broken answer beside rows of other species: a model would take them for evidence."""
    stand_in.pairs = pairs
    with pytest.raises(UserError, match=words) as raised:
        paired(address, tmp_path / "x_paired")
    assert not isinstance(raised.value, NotPairedError)
    assert not (tmp_path / "x_paired").exists()


def test_a_server_without_pairs_is_told_from_one_that_does_not_answer(
    stand_in: StandIn, address: str, tmp_path: Path
) -> None:
    """Catches complexes that cannot be predicted with a server that only searches, and pairs that a busy one would have."""
    stand_in.pairs = 404
    with pytest.raises(NotPairedError, match=r"pairs no rows of different chains .*ticket/pair: 404"):
        paired(address, tmp_path / "x_paired")
    stand_in.pairs, stand_in.never = None, {"GSTLLK"}
    with pytest.raises(NotPairedError, match="could not search"):
        paired(address, tmp_path / "x_paired")
    stand_in.broken = [503] * 5
    with pytest.raises(NoAnswerError):
        paired(address, tmp_path / "x_paired")


def hits_of(table: bytes) -> list[list[str] | None]:
    """The hits of both sequences of `QUERY` in a table."""
    members = {"uniref.a3m": alignments(QUERY, "x"), "pdb70.m8": table}
    return [
        None if one.templates is None else [*one.templates] for one in split(packed(members), 2, 1 << 26, "http://host")
    ]


def test_the_best_template_hits_of_each_sequence() -> None:
    """Catches hits of another sequence, in the order of the table, twice, or more of them than a request should name."""
    many = " ".join(f"{number:04d}_A:{number}e-9" for number in range(1, 30))
    table = hit_table([f"1abc_B:1e-3 2ABC_C:1e-20 1abc_B:1e-4 3abc_AA:0.5 {many}", "4abc_D:10"])
    first, second = hits_of(table)
    assert first == ["2ABC_C", *(f"{number:04d}_A" for number in range(1, 20))]
    assert second == ["4abc_D"]
    assert hits_of(hit_table(["", ""])) == [[], []]


BAD = b"102\t%s\t0.4\t10\t6\t0\t1\t10\t1\t10\t%s\t50\n"


@pytest.mark.parametrize(
    "line",
    [
        BAD % (b"1abc_A/../", b"1"),
        BAD % (b"1abc_A,2abc_B", b"1"),
        BAD % (b"1abc_" + b"A" * 9, b"1"),
        BAD % (b"1abc_A", b"nan"),
        BAD % (b"1abc_A", b"1e-"),
        BAD % (b"1ab\xc3_A", b"1"),
        (BAD % (b"1abc_A", b"1")).replace(b"102", b"103"),
        (BAD % (b"1abc_A", b"1")).replace(b"102", b"9" * 5000),
        b"102\t1abc_A\t0.4\n",
        b"102\t" * 2_000_000,
    ],
)
def test_a_line_that_is_no_hit(line: bytes) -> None:
    """Catches names that lead to other addresses or files, tracebacks, and a table that takes minutes or gigabytes."""
    assert hits_of(line + hit_table(["", "4abc_D:1"]))[1] in (["4abc_D"], [])
    assert hits_of(hit_table(["", "4abc_D:1"]) + line)[1] == ["4abc_D"]


def test_structures_of_templates_stay_in_their_folder(stand_in: StandIn, address: str, tmp_path: Path) -> None:
    """Catches files that an archive names elsewhere or that were not asked for, links, and half of an answer that is kept."""
    server, kept = MsaServer(address, ServerLimits(answer_mib=1), sleep=Rests()), tmp_path / "x" / "templates"
    stand_in.structures = {
        "../../1abc.cif": b"one",
        "/tmp/9abc.cif": b"",
        "2ABC.cif": b"two",
        "2abc.cif.gz": b"",
        ".cif": b"",
    }
    server.keep_templates(["1ABC_A", "2abc_B", "3abc_C"], kept, print)
    assert stand_in.templates == ["1ABC_A,2abc_B,3abc_C"]
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {"1abc.cif": b"one", "2abc.cif": b"two"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    stand_in.structures = {"1abc.cif": bytes(2 << 20)}
    with pytest.raises(BadAnswerError, match="unpacks to more than 1 MiB"):
        server.keep_templates(["1abc_A"], tmp_path / "y" / "templates", print)
    assert not (tmp_path / "y").exists()
    server.keep_templates([], tmp_path / "z" / "templates", print)
    assert len(stand_in.templates) == 2
    assert not any((tmp_path / "z" / "templates").iterdir())


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


def tarred(*entries: bytes) -> bytes:
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
        (tarred(entry(content=bytes(2 << 20)), entry()), r"more than 1 MiB \(--msa_server_limits\.answer_mib\)$"),
        (tarred(entry("other.bin", content=bytes(2 << 20)), entry()), r"more than 1 MiB \(--msa_server_limits\.answer_mib\)$"),
        (tarred(entry("x", kind=b"x", content=bytes(2 << 20)), entry()), r"than 1 MiB \(--msa_server_limits\.answer_mib\)$"),
        (tarred(entry(size=-512), entry()), "a file of -512 bytes"),
        (tarred(entry(size=2**80), entry()), "a file of 1208925819614629174706176 bytes"),
        (sparse(900 << 20), "does not begin with the number"),
        (tarred(entry(content=b">" + b"1" * 5000 + b"\nAAA\n")), "does not begin with the number"),
        (tarred(entry(content=b">999\nAAA\n")), "the record 999, which was not asked for"),
        (tarred(*(entry(f"{number}.a3m") for number in range(101))), "more than 100 alignment files"),
        (tarred(entry())[:-20], "broken gzip archive"),
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
    (found,) = split(tarred(*deep, *links, *names, entry()), 1, 8 << 20, PLACE)
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
            send(answer(tarred(entry(content=b">101\nGSTLLK\n\0"))))

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
        send(answer(STATE) if first.startswith("POST") else answer(tarred(entry())))

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
