"""The client of a server with ColabFold's protocol: a ticket for some sequences, its state, and an archive of alignments,
gzipped tar, of A3M files for several sequences.

POST <address>/ticket/msa hands in FASTA records called 101, 102, …; GET <address>/ticket/<id> says how far the search is;
and GET <address>/result/download/<id> is a gzipped tar archive. In each of its A3M files a zero byte ends the alignment of a
record. After POST <address>/ticket/pair, with the different sequences of a complex, there is a pair.a3m with as many rows of
each sequence: those with one number are of one species and belong together. pdb70.m8 is a table of chains of the PDB that are
like the sequences, and GET <address>/template/<chains> an archive of their structures, <entry>.cif. Whatever the server sends
ends within `ServerLimits`. The standard library talks to the server: requests and httpx would be one more dependency for four
kinds of request.

Nothing is written while it is taken apart, and names of files in it have no effect. The headers are read here, not by
tarfile's reader, which follows extended headers of any size and depth, fills gaps of sparse files with zeros, and goes back
where a file has a negative size. The servers write plain entries.
"""

from __future__ import annotations

import json
import random
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit

from evodsp.data.formats import parse_a3m
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.msa import check_alignments
from evodsp.data.templates.source import MOST_HITS
from evodsp.errors import FileFormatError, UserError
from evodsp.files import whole_folder
from evodsp.printing import counted, duration, quoted
from evodsp.reading.answers import (
    PASSING,
    BadAnswerError,
    SlowAnswerError,
    ask,
    check_address,
    content_of,
    without_login,
)
from evodsp.reading.text_files import TooLargeError, unpack
from evodsp.search.config import PUBLIC, ServerLimits, ServerPairing
from evodsp.search.searcher import TEMPLATE, Found, NoAnswerError, Say, Searcher, keep

FIRST = 101
"""The number of the first sequence of a request."""
_BLOCK = 512
_MOST_FILES = 100
"""A3M files of an archive; ColabFold's servers send three."""
_HITS = "pdb70.m8"
_LARGEST_HITS = 1 << 23
"""Bytes that are read of the table of templates: its first 70,000 lines."""
_NAME = re.compile(rf"[A-Za-z0-9_][\w.-]{{0,99}}\.a3m|{re.escape(_HITS)}", re.ASCII)
_CIF = re.compile(r"[A-Za-z0-9]{4}\.cif", re.ASCII)
_HIT = re.compile(
    rb"(?m)^(\d{1,9})[ \t]+(%s)(?:[ \t]+[^ \t\n]+){8}[ \t]+([0-9.eE+-]{1,30})\b" % TEMPLATE.pattern.encode()
)
"""A line of that table: the number of a sequence, a chain, eight other columns, the E-value."""
_QUERY = re.compile(rb"\s*>(\d{1,9})\s*\n")
_ROW = re.compile(rb">([^\n]*)\n([^>]*)")
_PAIRS = "pair.a3m"
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class NotPairedError(UserError):
    """A server that pairs no rows at all, or none of these sequences."""


def split(archive: bytes, sequences: int, most: int, address: str) -> list[Found]:
    """The A3M files of an archive, one set for each of the sequences, which are numbered from `FIRST` on.

    `most`: bytes that it may unpack to. `address`: of the server, for messages. Raises BadAnswerError if it is something else.
    """
    files: list[dict[str, bytes]] = [{} for _ in range(sequences)]
    templates: Sequence[Sequence[str] | None] = [None] * sequences
    names = set()
    for name, content in _files(archive, _NAME, most, address):
        if name == _HITS:
            templates = _best_hits(content, sequences)
            continue
        names.add(name)
        if len(names) > _MOST_FILES:
            raise BadAnswerError(f"{address}: the answer holds more than {_MOST_FILES} alignment files; try again")
        for number, alignment in _records(content, name, address):
            if not 0 <= number < sequences:
                raise BadAnswerError(f"{address}: {name} holds the record {number + FIRST}, which was not asked for")
            files[number][name] = alignment
    return [Found(found, templates=own) for found, own in zip(files, templates, strict=True)]


def _best_hits(table: bytes, sequences: int) -> list[list[str]]:
    """The chains that the table of templates has for each sequence, at most `MOST_HITS`, by rising E-value. Lines of another
    form are passed over."""
    found: list[dict[str, float]] = [{} for _ in range(sequences)]
    for line in _HIT.finditer(table[:_LARGEST_HITS]):
        number, name = int(line[1]) - FIRST, line[2].decode()
        with suppress(ValueError):
            if 0 <= number < sequences:
                found[number].setdefault(name, float(line[3]))
    return [sorted(own, key=lambda name: own[name])[:MOST_HITS] for own in found]


def _files(archive: bytes, wanted: re.Pattern[str], most: int, address: str) -> Iterator[tuple[str, bytes]]:
    """The plain files of an archive whose names, without folders, are as `wanted`."""
    try:
        if not archive.startswith(b"\x1f\x8b"):
            raise tarfile.HeaderError("not gzipped")
        for name, content in _members(unpack(address, archive, most)):
            if wanted.fullmatch(name := name.rpartition("/")[2]):
                yield name, content
    except TooLargeError as error:
        limit = f"{most / 2**20:,.0f} MiB (--msa_server_limits.answer_mib)"
        raise BadAnswerError(f"{address}: the answer unpacks to more than {limit}") from error
    except (tarfile.TarError, FileFormatError) as error:
        why = quoted(str(error).removeprefix(f"{address}: "))
        raise BadAnswerError(f"{address}: the answer is no gzipped tar archive ({why}); try again") from error


def _members(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The plain files of an uncompressed archive. Whatever else there is, is passed over. Raises TarError."""
    place = 0
    while place < len(content) and (header := content[place : place + _BLOCK]).strip(b"\0"):
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        place += _BLOCK
        if not 0 <= member.size <= len(content) - place:
            raise tarfile.ReadError(f"a file of {member.size} bytes, where {len(content) - place:,} follow")
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield member.name, content[place : place + member.size]
        place += -(-member.size // _BLOCK) * _BLOCK


def _records(content: bytes, name: str, address: str) -> Iterator[tuple[int, bytes]]:
    """The alignments of an A3M file, with the numbers of their sequences from 0. Each ends with a zero byte."""
    for found in re.finditer(rb"[^\0]+", content):
        alignment = found[0]
        if not alignment.strip():
            continue
        header = _QUERY.match(alignment)
        if header is None:
            raise BadAnswerError(
                f"{address}: {name} holds an alignment that does not begin with the number of a sequence"
            )
        yield int(header[1]) - FIRST, alignment


def side_by_side(parts: Sequence[bytes], sequences: Sequence[str], address: str) -> bytes:
    """ColabFold's alignment of a complex from the paired rows of each of its sequences. Raises UserError if the rows are not as
    many of each, or not of these sequences."""
    for number, (part, letters) in enumerate(zip(parts, sequences, strict=True), FIRST):
        if not part:
            raise BadAnswerError(f"{address}: the answer holds no {_PAIRS} of sequence {number}; try again")
        check_alignments([parse_a3m(f"{address}: {_PAIRS}", part)], ProteinSequence(str(number), letters))
    rows = [_ROW.findall(part) for part in parts]
    if len({len(own) for own in rows}) > 1:
        counts = ", ".join(f"{len(own):,}" for own in rows)
        raise BadAnswerError(
            f"{address}: {_PAIRS} holds {counts} rows of the sequences, but pairs are as many of each; try again"
        )
    text = [f"#{','.join(str(len(letters)) for letters in sequences)}\t{','.join('1' for _ in sequences)}\n".encode()]
    for pairs in zip(*rows, strict=True):
        names, own = zip(*pairs, strict=True)
        text.append(b">%s\n%s\n" % (b"\t".join(name.strip() for name in names), b"".join(b"".join(own).split())))
    return b"".join(text)


ATTEMPTS = 5
_MODE = "env"
"""UniRef and environmental sequences, filtered: what ColabFold asks for."""
_MOST_OF_STATUS = 1 << 20
"""Bytes of an answer that is no archive."""
_POLL_S = 5.0
_LONGEST_PAUSE_S = 60.0
_SAY_EVERY_S = 60.0
_WORKING = ("PENDING", "RUNNING", "UNKNOWN")
_BUSY = (429, 500, 502, 503, 504)
_ID = re.compile(r"[A-Za-z0-9_-][\w.-]{0,199}", re.ASCII)
"""Of a ticket, which becomes a part of addresses."""


class MsaServer(Searcher):
    """A server with ColabFold's protocol."""

    most = 20
    about_none = (
        ": a server may find some when it is asked again, with --retry true, or by the same command after a day"
    )

    def __init__(
        self,
        address: str,
        limits: ServerLimits | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        pairing: ServerPairing = "greedy",
    ) -> None:
        """`address`: may hold a user name and a password, which only this server is sent. Raises UserError if it is none."""
        self.pairing = f"pair{pairing}"
        """ColabFold's word for the way in which it pairs rows."""
        check_address("--msa_server", address, PUBLIC)
        self._asked, self._limits = address.rstrip("/"), limits or ServerLimits()
        self.address = without_login(self._asked)
        """The address without a user name and a password."""
        self._sleep, self._clock = sleep, clock

    def announcement(self, sequences: int) -> str:
        what = counted(sequences, "sequence")
        is_open = self.address.startswith("http:") and urlsplit(self.address).hostname not in _THIS_MACHINE
        who = "whose operator can read them" + (", as can anyone on the way: http is not encrypted" if is_open else "")
        return f"{what} will be sent to {self.address}, {who}; alignments are searched there"

    @property
    def origin(self) -> dict[str, Any]:
        return {"server": self.address, "mode": _MODE}

    def search(self, sequences: Sequence[str], say: Say) -> list[Found]:
        until = self._clock() + self._limits.search_s
        ticket = self._wait(self._submit("msa", _MODE, sequences, say, until), say, until)
        return self._download(ticket, len(sequences), say, until)

    def keep_pairs(self, sequences: Sequence[str], folder: Path, say: Say) -> None:
        """Ask for the paired rows of the different sequences of a complex, and keep them in `folder` as ColabFold's alignment
        of a complex.

        Raises NotPairedError if the server pairs no rows, NoAnswerError if it does not answer, UserError for a wrong answer.
        """
        until = self._clock() + self._limits.search_s
        try:
            ticket = self._wait(self._submit("pair", self.pairing, sequences, say, until), say, until)
        except NoAnswerError:
            raise
        except UserError as error:
            raise NotPairedError(f"{self.address} pairs no rows of different chains ({error})") from error
        parts = [found.files.get(_PAIRS, b"") for found in self._download(ticket, len(sequences), say, until)]
        content = side_by_side(parts, sequences, self.address)
        keep(folder, Found({_PAIRS: content}), {**self.origin, "mode": self.pairing})

    def keep_templates(self, chains: Sequence[str], folder: Path, say: Say) -> None:
        """Ask for the structures of chains of the PDB, and keep in `folder` those that the server sends, as <entry>.cif.

        Raises NoAnswerError if the server does not answer, UserError for a wrong answer.
        """
        most, until = self._limits.answer_mib << 20, self._clock() + self._limits.search_s
        entries = {chain.partition("_")[0].lower() for chain in chains}
        answer = self._ask(f"template/{','.join(chains)}", say, until, most) if chains else b""
        with whole_folder(folder) as new:
            for name, content in _files(answer, _CIF, most, self.address) if chains else ():
                if (entry := name.removesuffix(".cif").lower()) in entries:
                    (new / f"{entry}.cif").write_bytes(content)

    def _download(self, ticket: str, sequences: int, say: Say, until: float) -> list[Found]:
        most = self._limits.answer_mib << 20
        return split(self._ask(f"result/download/{ticket}", say, until, most), sequences, most, self.address)

    def _submit(self, kind: str, mode: str, sequences: Sequence[str], say: Say, until: float) -> dict[str, Any]:
        """A ticket; waits while the server refuses one because it is asked too often. `kind`: msa or pair."""
        fasta = "".join(f">{number}\n{letters}\n" for number, letters in enumerate(sequences, FIRST))
        form = urlencode({"q": fasta, "mode": mode}).encode()
        pause = _POLL_S
        while True:
            answer = self._json(f"ticket/{kind}", say, until, form)
            status = answer["status"]
            if status not in ("RATELIMIT", "UNKNOWN"):
                return answer
            if self._clock() + pause > until:
                raise NoAnswerError(
                    f"{self.address} has refused a search for {duration(self._limits.search_s)} ({status}); try later, or "
                    "another --msa_server"
                )
            say(f"{self.address} is asked too often: next attempt in {pause:.0f} s")
            self._rest(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _wait(self, answer: dict[str, Any], say: Say, until: float) -> str:
        """The number of the ticket, when its search is complete."""
        begun = said = self._clock()
        while (status := answer["status"]) in _WORKING:
            elapsed = self._clock() - begun
            if self._clock() > until:
                raise NoAnswerError(
                    f"{self.address} has not finished a search in {duration(elapsed)}; the same command asks again, and "
                    "the server may have it by then"
                )
            if self._clock() - said > _SAY_EVERY_S:
                said = self._clock()
                say(f"{self.address}: {status.lower()} for {duration(elapsed)}")
            self._rest(_POLL_S)
            answer = self._json(f"ticket/{answer['id']}", say, until)
        if status == "MAINTENANCE":
            raise NoAnswerError(f"{self.address} is under maintenance; try later, or another --msa_server")
        if status != "COMPLETE":
            raise UserError(
                f"{self.address} could not search this sequence ({quoted(status)}); look at its letters, or try again"
            )
        return str(answer["id"])

    def _rest(self, seconds: float) -> None:
        """Wait, not as long as other clients that were refused at the same moment."""
        self._sleep(seconds * random.uniform(1.0, 1.5))

    def _json(self, path: str, say: Say, until: float, form: bytes | None = None) -> dict[str, Any]:
        """An answer with a status and, unless that is a refusal, an id."""
        text = self._ask(path, say, until, _MOST_OF_STATUS, form)
        try:
            answer = json.loads(text)
            status, number = answer["status"], answer.get("id", "")
            if not isinstance(status, str) or not (number == "" or _ID.fullmatch(str(number))):
                raise ValueError
            if status in (*_WORKING, "COMPLETE") and status != "UNKNOWN" and not number:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadAnswerError(
                f"{self.address}/{path} answers '{quoted(text)}', which is not ColabFold's protocol; check --msa_server"
            ) from error
        return dict(answer)

    def _ask(self, path: str, say: Say, until: float, most: int, form: bytes | None = None) -> bytes:
        """Answer of the server, at most `most` bytes. A connection that fails, and a server that is busy, are tried again,
        if that is before `until`.

        Raises NoAnswerError if there is no answer, BadAnswerError if there is one that cannot be used.
        """
        where, reason, pause, is_bad = f"{self.address}/{path}", "", _POLL_S, False
        for attempt in range(ATTEMPTS):
            if attempt:
                if self._clock() + pause > until:
                    limit = duration(self._limits.search_s)
                    raise NoAnswerError(
                        f"{where}: {reason}; to ask again in {duration(pause)} would be later than the {limit} that a search "
                        "may take (--msa_server_limits.search_s)"
                    )
                say(f"{self.address} does not answer ({reason}): attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s")
                self._rest(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            seconds = min(self._limits.answer_s, max(1.0, until - self._clock()))
            try:
                address = f"{self._asked}/{path}"
                return content_of(where, ask(address, seconds, most, form=form), most)
            except HTTPError as error:
                reason = quoted(f"{error.code} {error.reason}")
                if error.code not in _BUSY:
                    is_bad = True
                    break
                pause = max(pause, _wanted(error.headers.get("Retry-After", "")))
            except SlowAnswerError as error:
                raise NoAnswerError(
                    f"{error} (--msa_server_limits.answer_s); try later, or another --msa_server"
                ) from error
            except PASSING as error:
                reason = quoted(getattr(error, "reason", error))
                is_bad = isinstance(error, HTTPException) and not isinstance(error, ConnectionError)
        kind = BadAnswerError if is_bad else NoAnswerError
        raise kind(f"{where}: {reason}; check the network and --msa_server, or try later")


def _wanted(retry_after: str) -> float:
    """The seconds that a server asks to wait; 0 where it says nothing, or a date."""
    if not (retry_after.isascii() and retry_after.isdecimal()):
        return 0.0
    return float(retry_after) if len(retry_after) < 10 else 1e9
