"""The store through which the ranks of a run meet, and the watch, which notices a rank that has stopped and says which
one.

torch's store asks nobody for a password: whoever reaches its port reads and writes every key. So a store of one machine
listens on its loopback address only, and evodsp's own values are numbers and texts that are checked here. Nothing is
unpickled.

A rank that waits in a collective cannot tell which rank it waits for. So a thread of every rank writes two numbers to the
store through which the ranks met: a HEARTBEAT, which the thread increases regularly, and the number of COLLECTIVES that the
rank has launched (torch counts those of each process group). Rank 0 reads the numbers of all ranks; the others read rank
0's:

torch does not count what CUDA graphs launch again: `count` adds those.

- A heartbeat that stands still: the process is stopped (SIGSTOP, a debugger), starved, or its machine is gone or unreachable.
- All hearts beat but no rank launches a collective: one rank hangs in its own code and the others wait for it. It is the rank
  that has launched the fewest. Nothing needs to report progress for this.

The rank that finds a problem writes a verdict to the store, prints it on standard error and ends its process at once: the
main thread may be waiting in a collective, where no exception can reach it. The other ranks read the verdict and end too.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.launch.environment import GIVEN_UP
from evodsp.printing import shown, tell

LONGEST = 4 << 20
"""Bytes of the longest value that is read. torch's store takes messages of twice this size."""
_BACKLOG = 2048
"""Connections that may wait to be accepted, as many as where torch itself listens."""


def loopback(host: str) -> str | None:
    """The address of `host` if that names this machine to itself, such as 127.0.0.1 for 'localhost'; otherwise None."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:  # the name of a machine
        return None


def local_store() -> dist.TCPStore:
    """A store on a free port of this machine's loopback address, where no other machine can reach it."""
    return _listening("127.0.0.1", 0, timedelta(minutes=5))


def open_store(host: str, port: int, timeout_s: float, hosts: bool) -> dist.TCPStore:
    """A connection to the store at `host`, which is made here if this process `hosts` it: on the loopback address if `host` is
    one, otherwise on all addresses, because ranks of other machines connect to it. Raises DistError if that is impossible.
    """
    timeout, address = timedelta(seconds=timeout_s), loopback(host)
    if hosts and address is not None:
        return _listening(address, port, timeout)
    return dist.TCPStore(address or host, port, None, hosts, timeout=timeout, wait_for_workers=False)


def _listening(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at one address. torch by itself listens at all of them, whatever host it is given."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise dist.DistNetworkError(f"cannot listen at {address}:{port}: {error.strerror}") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def text(store: dist.Store, key: str) -> str:
    """The text under a key that has been set, or is about to be: ranks come to a place one after another.

    Raises UserError if the store's time limit passes without one, if it is no text, or too long a one.
    """
    try:
        value = store.get(key)
    except dist.DistStoreError:  # nothing but the time limit; a lost connection is a DistNetworkError
        raise foreign(store, key, "nothing", "a text") from None
    return as_text(store, key, value)


def as_text(store: dist.Store, key: str, value: bytes) -> str:
    """A value of the store as text. `key`: the key of the value. Raises UserError if it is no text, or too long a one."""
    if len(value) > LONGEST:
        raise foreign(store, key, f"{len(value):,} bytes", f"{LONGEST:,} at most")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise foreign(store, key, shown(value), "UTF-8 text") from None


def set_texts(store: dist.Store, key: str, texts: Sequence[str]) -> None:
    """Write texts under a key, as JSON."""
    store.set(key, json.dumps(list(texts)))


def texts(store: dist.Store, key: str) -> list[str]:
    """The texts that `set_texts` wrote. Raises UserError if anything else is under the key, or nothing."""
    found = text(store, key)
    try:
        content = json.loads(found)
        if isinstance(content, list) and all(isinstance(entry, str) for entry in content):
            "".join(content).encode()  # JSON can spell halves of characters
            return content
    except (ValueError, RecursionError):
        pass
    raise foreign(store, key, shown(found), "a list of texts in JSON")


def foreign(store: dist.Store, key: str, found: str, expected: str) -> UserError:
    """The error for a value that no rank has written."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    where = f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
    return UserError(
        f"the ranks' store{where}, key {key}: found {found}, expected {expected}; another program writes into it. "
        "Close its port to other users and machines (docs/security.md, 'Ports')"
    )


SILENCE_S = 60.0
"""A busy process delays its heartbeat by a second or two; this leaves room for a machine that swaps."""

# Wait between losing the store and ending the process: at the end of a run, the store's host may finish before this rank.
_GRACE_S = 5.0


@dataclass(frozen=True)
class State:
    """The numbers that a rank writes about itself."""

    heartbeat: int
    collectives: int


class StallDetector:
    """Finds the rank that all others wait for, from states and times alone.

    `silent_s`: how long a heartbeat may stand still; `stalled_s`: how long no rank may launch a collective.
    """

    def __init__(self, silent_s: float, stalled_s: float) -> None:
        self.silent_s, self.stalled_s = silent_s, stalled_s
        self._states: dict[int, State] = {}
        self._last_beat: dict[int, float] = {}
        self._last_launch = self._last_look = 0.0

    def find(self, states: Mapping[int, State], now: float) -> tuple[list[int], str] | None:
        """The ranks at fault and a description of the fault at time `now` (s); None while all is well.

        After a pause in the looks all times start again: this process was stopped itself, perhaps with the whole job (a batch
        system suspends whole jobs), so old heartbeats prove nothing.
        """
        if not self._states or now - self._last_look > self.silent_s / 2:
            self._last_beat, self._last_launch = dict.fromkeys(states, now), now
        for rank, state in states.items():
            former = self._states.get(rank)
            if former is None or state.heartbeat != former.heartbeat:
                self._last_beat[rank] = now
            if former is None or state.collectives != former.collectives:
                self._last_launch = now
        self._states, self._last_look = dict(states), now
        stalled = now - self._last_launch > self.stalled_s
        # A silent rank explains a stall even if it has been silent for a shorter time.
        patience = self.silent_s / 2 if stalled else self.silent_s
        if silent := [rank for rank in states if now - self._last_beat[rank] > patience]:
            return silent, f"sent no heartbeat for {patience:g} s (stopped, starved, or its machine is gone)"
        if stalled:
            least = min(state.collectives for state in states.values())
            most = max(state.collectives for state in states.values())
            if least == most:
                return [], f"no rank launched a collective for {self.stalled_s:g} s; all have launched {most}"
            behind = [rank for rank, state in states.items() if state.collectives == least]
            return (
                behind,
                f"launched no collective for {self.stalled_s:g} s while others wait, {most - least} ahead",
            )
        return None


class Watch(threading.Thread):
    """The watching thread of one rank. `store` must be its own client: the main thread may be waiting on another one.

    `together`: whether the ranks launch collectives all along. If not, only heartbeats count.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout_s: float, together: bool = True) -> None:
        super().__init__(name="evodsp watch", daemon=True)
        self._store, self._rank = store, rank
        self._silent_s = min(SILENCE_S, timeout_s)
        self._interval = min(5.0, self._silent_s / 10)
        # A rank that sees only rank 0 cannot tell which rank is behind.
        self._detector = StallDetector(self._silent_s, timeout_s if rank == 0 and together else math.inf)
        self._watched = range(ranks) if rank == 0 else range(1)
        self._heartbeat = 0
        self._counts: list[Callable[[], int]] = []
        self._stop_asked = threading.Event()
        store.set(f"who/{rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})")
        self._write_state()

    def run(self) -> None:
        """Look regularly until `stop` is called or the run has to end."""
        try:
            self._watch()
        except UserError as error:  # the main thread would not hear of it
            _end(str(error))

    def _watch(self) -> None:
        store = f"the ranks' store, hosted by {text(self._store, 'who/0')} or its launcher,"
        silent = f"{store} gave no answer for {self._silent_s:g} s (stopped, or the machine is gone)"
        while not self._stop_asked.wait(self._interval):
            # The connection to a stopped store stays open, and a request waits without limit.
            late = threading.Timer(self._silent_s, _end, [silent])
            late.daemon = True
            late.start()
            try:
                message = self._look()
            except RuntimeError as error:  # the store's
                late.cancel()
                if not self._stop_asked.wait(_GRACE_S):
                    why = " ".join(str(error).split("\n")[0].split())
                    _end(f"{store} is gone: {why}")
                return
            late.cancel()
            if message is not None:
                _end(message)

    def count(self, collectives: Callable[[], int]) -> None:
        """Count further collectives of this rank. `collectives`: their number so far; called in another thread."""
        self._counts.append(collectives)

    def stop(self) -> None:
        """Stop looking. Returns when the thread has ended."""
        self._stop_asked.set()
        self.join()

    def _look(self) -> str | None:
        self._write_state()
        if self._store.check(["verdict"]):
            return ""  # the rank that found the problem has printed it
        values = self._store.multi_get([f"state/{rank}" for rank in self._watched])
        states = {rank: self._state(rank, value) for rank, value in zip(self._watched, values, strict=True)}
        found = self._detector.find(states, time.monotonic())
        if found is None:
            return None
        ranks, what = found
        message = f"{', '.join(text(self._store, f'who/{rank}') for rank in ranks)} {what}".strip()
        self._store.set("verdict", message)
        return message

    def _state(self, rank: int, value: bytes) -> State:
        key = f"state/{rank}"
        try:
            heartbeat, collectives = map(int, as_text(self._store, key, value).split())
            return State(heartbeat, collectives)
        except ValueError:
            raise foreign(self._store, key, shown(value), "two numbers") from None

    def _write_state(self) -> None:
        self._heartbeat += 1
        collectives = _launched() + sum(count() for count in self._counts)
        self._store.set(f"state/{self._rank}", f"{self._heartbeat} {collectives}")


def watch_of_this_process() -> Watch | None:
    """The running watch, if there is one."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, Watch)), None)


def _launched() -> int:
    """Number of collectives that this rank has launched in all its groups, as torch counts them."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def _end(message: str) -> None:
    """End this process from the watching thread: nothing else gets a main thread out of a collective."""
    if message:
        tell(f"evodsp: error: {message}; the run is ended")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(GIVEN_UP)
