"""A server on this machine that answers whatever bytes a test wants, over sockets, as slowly as it wants."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
