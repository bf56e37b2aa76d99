"""Runs `evodsp` on several ranks of this machine: starts them, shows the output of rank 0, ends all when one fails.

torchrun does this too, for several machines and with restarts. This launcher knows the exit codes of `evodsp`: a user's mistake
that every rank finds is printed once, and a dead rank is named in one line while the others are ended at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from evodsp.errors import UserError
from evodsp.launch.environment import GIVEN_UP, LAUNCHER, OWN_RUN, STOPPED
from evodsp.launch.watch import local_store
from evodsp.printing import counted, tell

POLL_S = 0.05
GRACE_S = 300.0
"""Seconds in which ranks may end after a signal, before they are killed: a training step, and writing a checkpoint."""
SAME_MISTAKE_S = 3.0
"""Seconds by which rank 0 may find the same mistake of the user later than another rank."""
SHOWN_LINES = 50
"""The number of lines of a failed rank's output to print."""


_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """File with its captured output; None for rank 0, whose output goes to the user."""

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.process.pid} on {socket.gethostname()})"

    def last_output(self) -> str:
        """The last lines of its output."""
        if self.output is None:
            return ""
        self.output.seek(0)
        return "\n".join(self.output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:])


class _Terminated(Exception):
    """This process got SIGTERM, SIGHUP or SIGUSR1."""


def launch(ranks: int, words: list[str]) -> int:
    """Run `evodsp *words` on `ranks` ranks of this machine and return the exit code of the run.

    2: a user's mistake, printed as one line. 75: a training run was asked to stop and has saved. 130: Ctrl-C. 143: SIGTERM,
    of a command that saves nothing. 1: a rank failed or died; standard error names it.
    The output of rank 0 is shown as it comes, the output of another rank only if that rank failed first.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            f"several ranks are started by a program's main thread only; use the command `evodsp {words[0]}` instead"
        )
    if ranks > (cores := _cores()):
        tell(
            f"evodsp: warning: {ranks} ranks share {counted(cores, 'core')}; on CPUs more ranks than cores gain nothing"
        )
    # Created here, so that it outlives every rank and uses a port that is certainly free.
    store = local_store()
    with _signals_noted() as asked, ExitStack() as stack:
        started = [_start(number, ranks, store.port, words, stack) for number in range(ranks)]
        try:
            first = _first_failure(started, asked)
        except KeyboardInterrupt:
            # The ranks are in their own sessions, so the terminal's Ctrl-C reached only this process.
            _end(started, signal.SIGINT)
            return 130
        except _Terminated:
            _end(started, signal.SIGTERM)
            return STOPPED if {rank.process.returncode for rank in started} <= {0, STOPPED} else 143
        finally:
            _end(started, signal.SIGKILL)  # they wait for a rank that is gone
        return 0 if first is None else _report_failure(first, started[0])


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
    """The variables that torchrun would set, so that libraries which know torchrun work here too."""
    threads = max(1, _cores() // ranks)
    settings = {
        LAUNCHER: os.getpid(),
        "RANK": number,
        "LOCAL_RANK": number,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": OWN_RUN,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    # Otherwise gloo resolves the host's name, which fails on some laptops.
    if "lo" in {name for _, name in socket.if_nameindex()}:
        settings["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {name: str(value) for name, value in settings.items()}


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Note SIGTERM, SIGHUP and SIGUSR1 instead of ending, so that no rank is left running.

    They may come several times, from a batch system or whoever is impatient, while the ranks save. Once there was one they
    are noted until the process ends: it is about to, with an exit code that says whether the run has saved.
    """
    noted: list[int] = []
    former = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in _SIGNALS}
    try:
        yield noted
    finally:
        if not noted:
            for number, handler in former.items():
                signal.signal(number, handler)


def _first_failure(started: list[_Rank], asked: list[int]) -> _Rank | None:
    """Wait until all ranks have succeeded (None) or one has failed; of several failures, return the most likely cause.

    Raises _Terminated if a signal was noted in `asked`.
    """
    while True:
        if asked:
            raise _Terminated
        codes = {rank.number: rank.process.poll() for rank in started}
        failed = [rank for rank in started if codes[rank.number]]
        if failed:
            # First a killed rank, then one that failed, last one that gave up because of another.
            failed.sort(key=lambda rank: (rank.process.returncode > 0, rank.process.returncode == GIVEN_UP))
            if failed[0].process.returncode == STOPPED:
                _wait(started, GRACE_S)
            if failed[0].process.returncode == 2:
                _wait(started[:1], SAME_MISTAKE_S)
            return failed[0]
        if all(code == 0 for code in codes.values()):
            return None
        time.sleep(POLL_S)


def _wait(ranks: list[_Rank], seconds: float) -> None:
    """Wait until the ranks have ended, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _end(started: list[_Rank], first_signal: signal.Signals) -> None:
    """Send `first_signal` to the running ranks, and kill those that do not end in time."""
    running = [rank for rank in started if rank.process.poll() is None]
    for rank in running:
        rank.process.send_signal(first_signal)
        rank.process.send_signal(signal.SIGCONT)  # a stopped process handles no other signal
    _wait(running, GRACE_S)
    for rank in running:
        if rank.process.poll() is None:
            rank.process.kill()
            rank.process.wait()


def _report_failure(rank: _Rank, rank_0: _Rank) -> int:
    """Print how `rank`, the first to fail, ended, and return the exit code of the run."""
    code = rank.process.returncode
    if code == 2 and rank_0.process.returncode == 2:  # rank 0 has printed the same mistake
        return 2
    if output := rank.last_output():
        tell(output)
    if code in (2, 130, STOPPED):  # its output says why
        return code
    if code == GIVEN_UP:
        return 1
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    why = ". Probably out of memory: Linux kills the largest process then" if code == -signal.SIGKILL else ""
    tell(f"evodsp: error: {rank} {how}; the other ranks were ended{why}")
    return 1
