"""The client of a server with ColabFold's protocol: a ticket for some sequences, its state, and an archive of alignments.

POST <address>/ticket/msa hands in FASTA records called 101, 102, …; GET <address>/ticket/<id> says how far the search is; and
GET <address>/result/download/<id> is a gzipped tar archive. In each of its A3M files a zero byte ends the alignment of a
record. The archive is read in memory and nothing is unpacked, so that names of files in it have no effect.
The standard library talks to the server: requests and httpx would be one more dependency for three kinds of request.
"""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from evodsp import __version__
from evodsp.download import PASSING, TIMEOUT_S
from evodsp.errors import UserError
from evodsp.progress import duration
from evodsp.search.searcher import Found, NoAnswerError, Say, Searcher

PUBLIC = "https://api.colabfold.com"
"""ColabFold's own server. It is named in the documentation only: nobody's sequences are sent without --msa_server."""
ATTEMPTS = 5
_FIRST = 101
_MODE = "env"
"""UniRef and environmental sequences, filtered: what ColabFold asks for."""
_MOST_BYTES = 1 << 30
_POLL_S = 5.0
_LONGEST_PAUSE_S = 60.0
_SAY_EVERY_S = 60.0
_WORKING = ("PENDING", "RUNNING", "UNKNOWN")
_BUSY = (429, 500, 502, 503, 504)


class MsaServer(Searcher):
    """A server with ColabFold's protocol."""

    most = 20

    def __init__(
        self,
        address: str,
        patience: float = 7200.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: seconds that a ticket may take, and that a busy server may refuse one.

        Raises UserError if `address` is no address.
        """
        if not address.startswith(("http://", "https://")):
            raise UserError(
                f"--msa_server '{address}' is no address; give one that begins with https://, such as {PUBLIC}"
            )
        self.address, self._patience = address.rstrip("/"), patience
        self._sleep, self._clock = sleep, clock

    def announcement(self, sequences: int) -> str:
        what = "1 sequence" if sequences == 1 else f"{sequences:,} sequences"
        return f"{what} will be sent to {self.address}, whose operator can read them: alignments are searched there"

    @property
    def origin(self) -> dict[str, Any]:
        return {"server": self.address, "mode": _MODE}

    def search(self, sequences: Sequence[str], say: Say) -> list[Found]:
        ticket = self._wait(self._submit(sequences, say), say)
        return _split(self._ask(f"result/download/{ticket}", say), len(sequences), self.address)

    def _submit(self, sequences: Sequence[str], say: Say) -> dict[str, Any]:
        """A ticket; waits while the server refuses one because it is asked too often."""
        fasta = "".join(f">{number}\n{letters}\n" for number, letters in enumerate(sequences, _FIRST))
        form = urlencode({"q": fasta, "mode": _MODE}).encode()
        begun, pause = self._clock(), _POLL_S
        while True:
            answer = self._json("ticket/msa", say, form)
            status = answer["status"]
            if status not in ("RATELIMIT", "UNKNOWN"):
                return answer
            if self._clock() - begun + pause > self._patience:
                raise NoAnswerError(
                    f"{self.address} has refused a search for {duration(self._patience)} ({status}); try later, or another "
                    "--msa_server"
                )
            say(f"{self.address} is asked too often: next attempt in {pause:.0f} s")
            self._rest(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _wait(self, answer: dict[str, Any], say: Say) -> str:
        """The number of the ticket, when its search is complete."""
        begun = said = self._clock()
        while (status := answer["status"]) in _WORKING:
            elapsed = self._clock() - begun
            if elapsed > self._patience:
                raise NoAnswerError(
                    f"{self.address} has not finished a search in {duration(elapsed)}; the same command asks again, and "
                    "the server may have it by then"
                )
            if self._clock() - said > _SAY_EVERY_S:
                said = self._clock()
                say(f"{self.address}: {status.lower()} for {duration(elapsed)}")
            self._rest(_POLL_S)
            answer = self._json(f"ticket/{answer['id']}", say)
        if status == "MAINTENANCE":
            raise NoAnswerError(f"{self.address} is under maintenance; try later, or another --msa_server")
        if status != "COMPLETE":
            raise UserError(
                f"{self.address} could not search this sequence ({status}); look at its letters, or try again"
            )
        return str(answer["id"])

    def _rest(self, seconds: float) -> None:
        """Wait, not as long as other clients that were refused at the same moment."""
        self._sleep(seconds * random.uniform(1.0, 1.5))

    def _json(self, path: str, say: Say, form: bytes | None = None) -> dict[str, Any]:
        """An answer with a status and, unless that is a refusal, an id."""
        text = self._ask(path, say, form)
        try:
            answer = json.loads(text)
            status, number = answer["status"], answer.get("id", "")
            if not isinstance(status, str) or not re.fullmatch(r"[\w.-]*", str(number)):
                raise ValueError
            if status in (*_WORKING, "COMPLETE") and status != "UNKNOWN" and not number:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            shown = " ".join(text[:80].decode("utf-8", "replace").split())
            raise NoAnswerError(
                f"{self.address}/{path} answers '{shown}', which is not ColabFold's protocol; check --msa_server"
            ) from error
        return dict(answer)

    def _ask(self, path: str, say: Say, form: bytes | None = None) -> bytes:
        """What the server answers. A connection that fails, and a server that is busy, are tried again."""
        request = Request(f"{self.address}/{path}", data=form, headers={"User-Agent": f"evodsp/{__version__}"})
        reason, pause = "", _POLL_S
        for attempt in range(ATTEMPTS):
            if attempt:
                say(f"{self.address} does not answer ({reason}): attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s")
                self._rest(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                with urlopen(request, timeout=TIMEOUT_S) as answer:
                    content: bytes = answer.read(_MOST_BYTES + 1)
            except HTTPError as error:
                reason = f"{error.code} {error.reason}"
                if error.code not in _BUSY:
                    break
                if (wanted := error.headers.get("Retry-After", "")).isdecimal():
                    pause = max(pause, float(wanted))
                continue
            except PASSING as error:
                reason = str(getattr(error, "reason", error))
                continue
            if len(content) > _MOST_BYTES:
                raise UserError(
                    f"{self.address}/{path} answers more than {_MOST_BYTES >> 20} MiB; that is no alignment"
                )
            return content
        raise NoAnswerError(f"{self.address}/{path}: {reason}; check the network and --msa_server, or try later")


def _split(archive: bytes, sequences: int, address: str) -> list[Found]:
    """The A3M files of an archive, one set for each sequence. Raises UserError if it holds something else."""
    files: list[dict[str, bytes]] = [{} for _ in range(sequences)]
    left = _MOST_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
            for member in opened:
                name = Path(member.name).name
                if not member.isfile() or not re.fullmatch(r"[\w][\w.-]*\.a3m", name):
                    continue
                left -= member.size
                if left < 0:
                    raise UserError(f"{address}: the answer holds more than {_MOST_BYTES >> 20} MiB of alignments")
                content = opened.extractfile(member)
                assert content is not None, "a file has content"
                for number, alignment in _records(content.read(), name, address):
                    if not 0 <= number < sequences:
                        raise UserError(
                            f"{address}: {name} holds the record {number + _FIRST}, which was not asked for"
                        )
                    files[number][name] = alignment
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{address}: the answer is no gzipped tar archive ({error}); try again") from error
    return [Found(found) for found in files]


def _records(content: bytes, name: str, address: str) -> list[tuple[int, bytes]]:
    """The alignments of an A3M file, with the numbers of their sequences from 0. Each ends with a zero byte."""
    found = []
    for alignment in content.split(b"\0"):
        if not alignment.strip():
            continue
        header = re.match(rb"\s*>(\d+)\s*\n", alignment)
        if header is None:
            raise UserError(f"{address}: {name} holds an alignment that does not begin with the number of a sequence")
        found.append((int(header[1]) - _FIRST, alignment))
    return found
