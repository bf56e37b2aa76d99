"""`evodsp selftest`: runs the checks as commands of their own, and prints a table of how they ended.

A check begins when those whose files it reads have succeeded. The table keeps the order of the list. A check that takes longer
than the limit has failed; it and the processes that it started are ended, and the others go on.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.printing import show
from evodsp.selftest.checks import Check, Suite
from evodsp.selftest.config import SelftestConfig

_ENDING_S = 40.0
"""Seconds that an ended launcher has to end its ranks."""
_COLUMN = " " * 17
"""What stands before the third column of the table."""


@dataclass(frozen=True)
class CheckResult:
    """How a check ended."""

    succeeded: bool
    seconds: float
    output: str


class CheckRunner:
    """Runs checks, and ends what is still running when it is left."""

    def __init__(self, jobs: int, limit_s: float, environment: dict[str, str]) -> None:
        self._jobs, self._limit_s, self._environment = jobs, limit_s, environment
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, checks: Sequence[Check]) -> Iterator[tuple[Check, CheckResult]]:
        """Each check and how it ended, in the order given, in which a check stands behind those that it is `after`."""
        with ThreadPoolExecutor(self._jobs) as pool:
            found: dict[Check, Future[CheckResult]] = {}
            try:
                for check in checks:
                    found[check] = pool.submit(self._result, check, [(c, found[c]) for c in check.after if c in found])
                for check in checks:
                    yield check, found[check].result()
            finally:
                self.stop()

    def stop(self) -> None:
        """End what is running, and begin nothing more."""
        with self._lock:
            self._stopped, running = True, list(self._running)
        for process in running:
            _end(process)

    def _result(self, check: Check, after: list[tuple[Check, Future[CheckResult]]]) -> CheckResult:
        for earlier, future in after:
            if not future.result().succeeded:
                return CheckResult(False, 0.0, f"left out, because it reads what '{earlier.name}' writes\n")
        begun = time.monotonic()
        with self._lock:
            if self._stopped:
                return CheckResult(False, 0.0, "not begun\n")
            process = subprocess.Popen(
                command_of(check), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True, env={**self._environment, **_place(check)},
            )  # fmt: skip
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            output = process.communicate()[0] + f"it took longer than {self._limit_s:g} s and was ended\n"
        finally:
            with self._lock:
                self._running.discard(process)
        return CheckResult(process.returncode == 0, time.monotonic() - begun, output)


def command_of(check: Check) -> list[str]:
    """The command line of a check, which finds evodsp where this process did: it need not be installed."""
    if check.ranks < 2:
        return [sys.executable, "-m", *check.words]
    # An address rather than this machine's name, which a machine without network may not be able to look up.
    launch = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", *launch, "--nproc-per-node", str(check.ranks), "-m", *check.words]


def _place(check: Check) -> dict[str, str]:
    """The variables by which a launcher tells a rank its place. A single rank needs no launcher, which starts in seconds."""
    if check.ranks != 1:
        return {}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and its processes. Ranks are in sessions of their own: their launcher ends them if it is asked to."""
    for number, wait_s in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Within, SIGTERM leaves the program as an interrupt does, through what cleans up."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rows(check: Check, result: CheckResult) -> str:
    """The row of a check in the table, and below it the lines of its results; of a check that failed, all of its output."""
    state, lines = "FAILED", result.output.splitlines()
    if result.succeeded:
        state, lines = "ok", [line.removeprefix("result: ") for line in lines if line.startswith("result: ")]
    return "\n".join([f"{state:<6} {result.seconds:>8.0f}  {check.name}", *(f"{_COLUMN}{line}" for line in lines)])


def run(settings: SelftestConfig, words: list[str]) -> int:
    """Run the checks and print the table. Returns 0 if all succeeded, otherwise 1. Raises UserError if there is no GPU."""
    if settings.scaling:
        from evodsp.selftest import scaling

        return scaling.run(settings, words)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = settings.jobs or max(1, cores // 2)
    available = settings.cpu
    if available is None:
        import torch

        available = torch.cuda.device_count()
    if available < 1:
        raise UserError("this machine has no GPU that PyTorch finds; give --cpu 2 to check it with two CPU processes")
    threads = str(max(1, cores // jobs // 2))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
    results = []
    show(f"{'result':<6} {'seconds':>8}  check", flush=True)
    with tempfile.TemporaryDirectory() as folder, _stopped_by_signals():
        suite = Suite("cpu" if settings.cpu else "cuda", available, Path(folder), jobs)
        stages = [(suite.kernels(), 1), (suite.one_device(), jobs)]
        if available > 1:
            stages.append((suite.several(), 1))
        for checks, at_once in stages:
            for check, result in CheckRunner(at_once, settings.limit, environment).run(checks):
                show(rows(check, result), flush=True)
                results.append(result.succeeded)
    if available == 1:
        show("One device cannot show what several do, except that ranks which share it compute what one computes.")
    failed = results.count(False)
    show(f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks succeeded")
    return int(failed > 0)
