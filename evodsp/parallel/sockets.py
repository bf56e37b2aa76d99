"""Exchanges between CPU ranks of one machine, by Unix sockets and on the thread that computes.

gloo hands each message from thread to thread. Every wake-up on the way takes tens of microseconds, and where ranks have no
cores to spare these threads interrupt the ones that compute. A step of a small model has a hundred exchanges, and gloo's took a
third of its time. Here `exchange` writes what the sockets take, and `wait` moves the rest. No other thread is involved, so
nothing moves while a rank computes; on a CPU moving takes a core in either case.

Libraries looked at: gloo's own send and receive are no faster than its all-to-all, for the same reason. PyTorch's wheels
contain neither MPI nor UCC, and there are no wheels of oneCCL's bindings for this PyTorch. gloo
communicates between machines, and for large sums.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.printing import logger

_log = logger(__name__)

# A rank that waits looks again and again for so long before it sleeps, because waking up takes longer than an exchange. Between
# two looks it offers its core to others.
_LOOKS_S = 2e-3
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))

_LONGEST_MS = (1 << 31) - 1
"""What `poll` can wait."""

_ENOUGH = 1 << 22
"""Bytes asked for as a socket's buffer. The system gives what it allows (Linux: `net.core.wmem_max`, often 200 kB)."""


class Exchange:
    """An exchange under way. Its tensors must not be used before `wait`."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets, self.unfinished = sockets, 0

    def wait(self) -> None:
        """Return when everything has arrived and everything has been sent. Raises DistNetworkError if a rank is gone."""
        if self.unfinished:
            self._sockets.finish(self)


class _Peer:
    """The connection to one rank: what is still to be sent, and where to put what comes, both in the order of the exchanges."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _ENOUGH)
        self.rank, self.connection = rank, connection
        self.leaving: deque[tuple[memoryview, Exchange]] = deque()
        self.arriving: deque[tuple[memoryview, Exchange]] = deque()

    def move(self) -> bool:
        """Send and receive what is possible without waiting. Returns whether anything was."""
        try:
            sent = _moved(self.leaving, self.connection.send)
            return _moved(self.arriving, self.connection.recv_into) or sent
        except (ConnectionError, EOFError) as error:
            raise dist.DistNetworkError(f"rank {self.rank} has closed its connection ({error})") from error


def _moved(parts: deque[tuple[memoryview, Exchange]], call: Callable[[memoryview], int]) -> bool:
    """Let `call` take from the front of `parts` what it can. Returns whether it took anything."""
    moved = False
    while parts:
        part, exchange = parts[0]
        try:
            number = call(part)
        except BlockingIOError:
            return moved
        if number == 0:
            raise EOFError("it has ended")
        moved = True
        if number < len(part):
            parts[0] = (part[number:], exchange)
        else:
            parts.popleft()
            exchange.unfinished -= 1
    return moved


class Sockets:
    """This rank's connections to the other ranks of a group. `Sockets.of` makes them; they are closed with the object."""

    def __init__(self, rank: int, connections: dict[int, tuple[int, socket.socket]], timeout_s: float) -> None:
        """`rank`: this one's number in the group. `connections`: to the others, by their numbers in the group, each with the
        rank's number in the run, for messages."""
        self._rank, self._timeout_s = rank, timeout_s
        self._peers = {number: _Peer(*named) for number, named in connections.items()}
        self.launched = 0
        """Number of exchanges so far. A rank that hangs has fewer than those who wait for it."""
        weakref.finalize(self, _close, [peer.connection for peer in self._peers.values()])

    @classmethod
    def of(cls, handle: dist.ProcessGroup, timeout_s: float) -> Sockets | None:
        """Connect the ranks of a group, which call this together; None if they are not all on one machine, or if that machine
        has no Unix sockets for them, which the first rank's log says.

        `timeout_s`: how long `wait` waits for a rank that sends nothing.
        """
        rank, ranks = dist.get_rank(handle), dist.get_world_size(handle)
        with ExitStack() as folder, ExitStack() as listening:
            listener, path = _listen(folder, listening, ranks)
            places: list[tuple[str, str | None]] = [("", None)] * ranks
            dist.all_gather_object(places, (socket.gethostname(), path), group=handle)
            machines, paths = zip(*places, strict=True)
            connected = {number: _connected(paths[number], rank) for number in range(rank)}
            all_connected: list[bool] = [False] * ranks
            dist.all_gather_object(all_connected, None not in [*connected.values(), *paths], group=handle)
            found = {number: connection for number, connection in connected.items() if connection is not None}
            if not all(all_connected) or listener is None:
                _close(list(found.values()))
                if rank == 0 and len(set(machines)) == 1:
                    _log.warning(
                        f"the {ranks} ranks of {machines[0]} that share a sample cannot connect by Unix sockets; they exchange "
                        "shards by gloo, which takes longer. Set TMPDIR to a folder with a short path in which they can write"
                    )
                return None
            listener.settimeout(timeout_s)
            for _ in range(rank + 1, ranks):  # they are waiting to be accepted
                connection, _ = listener.accept()
                found[int.from_bytes(connection.recv(_NAME, socket.MSG_WAITALL))] = connection
        named = {number: (dist.get_global_rank(handle, number), one) for number, one in found.items()}
        return cls(rank, named, timeout_s)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Exchange:
        """Send each rank one of `sent`, and receive one of `received` from each, by their numbers in the group.

        Each is contiguous, with the size and type at the other end; a tensor may be sent to several ranks. All ranks of the
        group call this in the same order.
        """
        self.launched += 1
        exchange = Exchange(self)
        for number, peer in self._peers.items():
            if incoming := _bytes(received[number]):
                peer.arriving.append((incoming, exchange))
            if outgoing := _bytes(sent[number]):
                peer.leaving.append((outgoing, exchange))
            exchange.unfinished += bool(incoming) + bool(outgoing)
        for peer in self._peers.values():
            peer.move()
        received[self._rank].copy_(sent[self._rank])
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """Move bytes of all exchanges until this one is done."""
        until = time.monotonic() + _LOOKS_S
        while exchange.unfinished:
            moved = [peer.move() for peer in self._peers.values()]
            if any(moved) or not exchange.unfinished:
                continue
            if time.monotonic() < until:
                _yield()
            else:
                self._sleep()

    def _sleep(self) -> None:
        """Sleep until something can be sent or received. Raises DistNetworkError if nothing can for too long."""
        ready = select.poll()
        for peer in self._peers.values():
            events = (select.POLLIN if peer.arriving else 0) | (select.POLLOUT if peer.leaving else 0)
            if events:
                ready.register(peer.connection, events)
        if not ready.poll(min(1000 * self._timeout_s, _LONGEST_MS)):
            waited_for = ", ".join(str(peer.rank) for peer in self._peers.values() if peer.arriving or peer.leaving)
            raise dist.DistNetworkError(f"rank {waited_for} has sent nothing for {self._timeout_s:g} s")


_NAME = 4  # bytes of a rank's number, which it sends when it connects


_SHORT = "/tmp"
"""Where sockets go if the path of the folder of temporary files is too long for them: Linux takes 107 bytes."""


def _listen(folder: ExitStack, listening: ExitStack, ranks: int) -> tuple[socket.socket | None, str | None]:
    """A socket that waits for the others, and its path; None where there are no Unix sockets."""
    for parent in (None, _SHORT):
        try:
            # Only this user can enter the folder.
            own = folder.enter_context(tempfile.TemporaryDirectory(prefix="evodsp-", dir=parent))
            listener = listening.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path := str(Path(own) / "rank"))
            listener.listen(ranks)
        except (OSError, AttributeError):
            continue
        return listener, path
    return None, None


def _connected(path: str | None, rank: int) -> socket.socket | None:
    """A connection to the rank that listens at `path`; None if that is on another machine."""
    if path is None:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(rank.to_bytes(_NAME))
    except OSError:
        connection.close()
        return None
    return connection


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.detach().view(-1).view(torch.uint8).numpy().data
