"""Stand-ins on this machine for a server with ColabFold's protocol, and for one that answers with any bytes."""

from __future__ import annotations

import io
import json
import re
import socketserver
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

FILES = ("uniref.a3m", "bfd.mgnify30.metaeuk30.smag30.a3m")
Members = dict[str, bytes]


class StandIn:
    """What the server does.

    `states`: what it says of a ticket, one after another, then COMPLETE. `refusals`: statuses that it answers to tickets before
    it takes one. `broken`: HTTP codes that it answers first. `never`: sequences that it cannot search.
    """

    def __init__(self) -> None:
        self.states: list[str] = []
        self.refusals: list[str] = []
        self.broken: list[int] = []
        self.never: set[str] = set()
        self.asked: list[list[str]] = []
        """The sequences of each ticket that was taken."""
        self.agents: set[str] = set()
        self.members: Members | None = None
        """What archives hold in place of alignments."""
        self.raw: bytes | None = None
        """What a download is in place of an archive."""
        self.pairs: bytes | int | None = None
        """What pair.a3m is; or the HTTP code of a server without pairs."""
        self.paired: list[list[str]] = []
        """The sequences of each ticket for pairs."""
        self.pairing = "pairgreedy"
        """The only mode of them that it takes."""
        self.hits: dict[str, str] | None = None
        """For each sequence the chains of the PDB that it finds, each with its E-value: 1abc_A:1e-9. None: it has no table."""
        self.structures: Members | int = {}
        """What an archive of templates holds; or an HTTP code."""
        self.templates: list[str] = []
        """The chains of each request for templates."""

    def ticket(self, form: dict[str, list[str]], kind: str = "msa") -> dict[str, str] | int:
        assert form["mode"] == [{"msa": "env", "pair": self.pairing}[kind]]
        if kind == "pair" and isinstance(self.pairs, int):
            return self.pairs
        if self.refusals:
            return {"status": self.refusals.pop(0), "id": ""}
        records = re.findall(r">(\d+)\n([A-Z]+)\n", form["q"][0])
        assert [int(number) for number, _ in records] == list(range(101, 101 + len(records)))
        asked = self.paired if kind == "pair" else self.asked
        asked.append([letters for _, letters in records])
        return {"status": "PENDING", "id": f"{kind}-{len(asked) - 1}"}

    def status(self, ticket: str) -> dict[str, str]:
        if self.never & set(self._sequences(ticket)):
            return {"status": "ERROR", "id": ticket}
        return {"status": self.states.pop(0) if self.states else "COMPLETE", "id": ticket}

    def archive(self, ticket: str) -> bytes:
        if self.raw is not None:
            return self.raw
        sequences = self._sequences(ticket)
        members = self.members or {name: alignments(sequences, name) for name in FILES}
        if ticket.startswith("pair"):
            members = {"pair.a3m": self.pairs if isinstance(self.pairs, bytes) else alignments(sequences, "species")}
        elif self.hits is not None:
            members["pdb70.m8"] = hit_table([self.hits.get(letters, "") for letters in sequences])
        return packed(members)

    def template(self, chains: str) -> bytes | int:
        self.templates.append(chains)
        return self.structures if isinstance(self.structures, int) else packed(self.structures)

    def _sequences(self, ticket: str) -> list[str]:
        kind, _, number = ticket.partition("-")
        return (self.paired if kind == "pair" else self.asked)[int(number)]


def packed(members: Members) -> bytes:
    """A gzipped tar archive."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def hit_table(hits: list[str]) -> bytes:
    """The table of templates as MMseqs2 writes it. `hits`: of each sequence, as `StandIn.hits` has them."""
    found = [(number, *hit.partition(":")) for number, own in enumerate(hits, 101) for hit in own.split()]
    lines = [f"{number}\t{name}\t0.4\t10\t6\t0\t1\t10\t1\t10\t{value}\t50\t10M\n" for number, name, _, value in found]
    return "".join(lines).encode()


def alignments(sequences: list[str], name: str) -> bytes:
    """An A3M file as MMseqs2 writes it: of each query itself, one sequence with an insertion and one with a gap."""
    parts = []
    for number, letters in enumerate(sequences, 101):
        rows = f">{number}\n{letters}\n>{name}_a\n{letters[:3]}gg{letters[3:]}\n>{name}_b\n{letters[:-1]}-\n"
        parts.append(rows.encode() + b"\0")
    return b"".join(parts)


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Serve on this machine; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.answer(lambda: stand_in.ticket(form, *([] if self.path == "/ticket/msa" else [self.path[-4:]])))

        def do_GET(self) -> None:
            place, _, ticket = self.path[1:].rpartition("/")
            makers: dict[str, Callable[[str], object]] = {
                "result/download": stand_in.archive,
                "template": stand_in.template,
            }
            self.answer(lambda: makers.get(place, stand_in.status)(ticket))

        def answer(self, make: object) -> None:
            stand_in.agents.add(self.headers["User-Agent"])
            if stand_in.broken:
                self.send_error(stand_in.broken.pop(0))
                return
            content = make()  # type: ignore[operator]
            if isinstance(content, int):
                self.send_error(content)
                return
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


Send = Callable[[bytes], None]
Answer = Callable[[str, str, Send], None]
"""Is given a request's first line, the rest of it, and a function that sends. That raises OSError when the client has gone."""


def answer(content: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A usual answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


@contextmanager
def raw_server(make: Answer) -> Iterator[str]:
    """Serve; yields the address. Every connection is one request."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            first, head = self.rfile.readline().decode().strip(), b""
            while (line := self.rfile.readline()).strip():
                head += line
            fields = [line.partition(b":") for line in head.lower().splitlines()]
            size = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
            rest = head + b"\n" + self.rfile.read(size)
            try:
                self.connection.settimeout(5.0)
                make(first, rest.decode(), self.connection.sendall)
            except OSError:
                pass

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
