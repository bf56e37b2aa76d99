"""`evodsp` on several ranks of this machine: starts them, shows what rank 0 says, ends them all when one fails.

torchrun does this too, for more machines and with restarts. This one knows what `evodsp` exits with: a user's mistake that
every rank finds stays one line, a dead rank is named in one line and the rest are ended at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch.distributed as dist

from evodsp.launch.watch import GIVEN_UP

POLL_S = 0.05
GRACE_S = 10.0
"""How long ranks may take to end when asked to, before they are killed."""
SAME_MISTAKE_S = 3.0
"""How long after another rank rank 0 may come upon the same mistake of the user's."""
SHOWN_LINES = 50
"""Of the output of a rank that failed."""


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """What it says; None for rank 0, which says it to the user."""

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.process.pid} on {socket.gethostname()})"

    def said(self) -> str:
        """The end of its output."""
        if self.output is None:
            return ""
        self.output.seek(0)
        return "\n".join(self.output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:])


class _Terminated(Exception):
    """This process was asked to end (SIGTERM, SIGHUP)."""


def launch(ranks: int, words: list[str]) -> int:
    """Run `evodsp *words` on `ranks` ranks of this machine and return the exit code of the whole.

    2: a user's mistake, told in one line. 130: Ctrl-C. 143: SIGTERM. 1: a rank failed or died; it is named on standard error.
    The output of rank 0 is shown as it comes, that of another one only if it failed first.
    """
    # Here, so that it outlives every rank and its port is free for sure.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with ExitStack() as stack:
        started = [_start(number, ranks, store.port, words, stack) for number in range(ranks)]
        try:
            with _signals_raised():
                first = _first_failure(started)
        except KeyboardInterrupt:
            # They are in a session of their own, so a terminal's Ctrl-C came to us alone.
            _end(started, signal.SIGINT)
            return 130
        except _Terminated:
            _end(started, signal.SIGTERM)
            return 143
        finally:
            _end(started, signal.SIGTERM)
        return 0 if first is None else _tell(first, started[0])


def _start(number: int, ranks: int, port: int, words: list[str], stack: ExitStack) -> _Rank:
    output = None if number == 0 else stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "evodsp", *words],
        env={**os.environ, **_environment(number, ranks, port)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    return _Rank(number, process, output)


def _environment(number: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set, so that whatever knows torchrun knows this."""
    threads = max(1, _cores() // ranks)
    settings = {
        "RANK": number,
        "LOCAL_RANK": number,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "evodsp",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    # gloo looks for the host's name otherwise, which not every laptop can resolve.
    if "lo" in {name for _, name in socket.if_nameindex()}:
        settings["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {name: str(value) for name, value in settings.items()}


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _signals_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise, so that ranks are not left behind."""

    def raise_terminated(number: int, frame: Any) -> None:
        raise _Terminated

    former = {number: signal.signal(number, raise_terminated) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _first_failure(started: list[_Rank]) -> _Rank | None:
    """Wait until all have ended well (None) or one has not: that one, or of several at once the likeliest cause."""
    while True:
        codes = {rank.number: rank.process.poll() for rank in started}
        failed = [rank for rank in started if codes[rank.number]]
        if failed:
            # Killed before failed, and that before given up because of another.
            failed.sort(key=lambda rank: (rank.process.returncode > 0, rank.process.returncode == GIVEN_UP))
            if failed[0].process.returncode == 2:
                _wait(started[:1], SAME_MISTAKE_S)
            return failed[0]
        if all(code == 0 for code in codes.values()):
            return None
        time.sleep(POLL_S)


def _wait(ranks: list[_Rank], seconds: float) -> None:
    """Until they have ended, or so long."""
    deadline = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _end(started: list[_Rank], first_signal: signal.Signals) -> None:
    """Ask those that still run to end, then make them."""
    running = [rank for rank in started if rank.process.poll() is None]
    for rank in running:
        rank.process.send_signal(first_signal)
        rank.process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal
    _wait(running, GRACE_S)
    for rank in running:
        if rank.process.poll() is None:
            rank.process.kill()
            rank.process.wait()


def _tell(rank: _Rank, first: _Rank) -> int:
    """Say what became of the rank that failed first; the exit code of the whole. `first`: rank 0."""
    code = rank.process.returncode
    if code == 2 and first.process.returncode == 2:  # which has said the same to the user
        return 2
    if said := rank.said():
        print(said, file=sys.stderr)
    if code in (2, 130):  # it has said why
        return code
    if code == GIVEN_UP:
        return 1
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"evodsp: error: {rank} {how}; the other ranks were ended", file=sys.stderr)
    return 1
