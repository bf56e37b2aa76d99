"""`evodsp` and the ranks that it starts, as forks of a process that has run before: else each of them takes seconds.

All else is as where Python starts them: exit codes, signals, sessions, environment, and where the output goes. `planted` is a
program that each of these processes runs first, as a file sitecustomize.py would be.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.builders.kept_parsers import kept_parsers
from tests.ranks import RankPool, Target, end_with_parent


class _Commands(RankPool):
    """A process that starts commands."""

    def __init__(self) -> None:
        super().__init__(ranks=1)
        self._start()
        (self.pipe,) = self._pipes

    def _target(self) -> Target:
        return _start_commands


@cache
def _commands() -> _Commands:
    return _Commands()


class ForkedCommand:
    """`evodsp *words`, which runs from now on; one at a time. `pid`: its process, whose children are the ranks."""

    def __init__(self, words: list[str], planted: str = "", **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self._pipe = _commands().pipe
        self._pipe.send((words, {**os.environ, "OMP_NUM_THREADS": "1", **variables}, self._files, planted))
        self.pid: int = self._pipe.recv()

    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._pipe.poll()

    def said(self) -> str:
        """Its standard output until now."""
        return self._files[0].read_text()

    def finish(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait until it ends."""
        if late := not self._pipe.poll(timeout):
            os.kill(self.pid, signal.SIGTERM)  # it ends its ranks
        done = subprocess.CompletedProcess([], self._pipe.recv(), *(file.read_text() for file in self._files))
        self._folder.cleanup()
        assert not late, f"no end within {timeout} s: {done}"
        return done


def run_forked(words: list[str], planted: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `evodsp *words`, with `variables` in its environment, and return how it ended and what it printed."""
    return ForkedCommand(words, planted, **variables).finish()


def number_of(pid: int) -> int:
    """The number of a rank."""
    return int(Path(f"/proc/{pid}/comm").read_text().removeprefix("rank "))


def _start_commands(_: int, __: int, ___: str, pipe: Connection) -> None:
    """Start each command that arrives through `pipe`; send its process id, and its exit code when it has ended."""
    end_with_parent()
    while True:
        try:
            words, environment, files, planted = pipe.recv()
        except EOFError:
            return
        with files[0].open("wb") as stdout, files[1].open("wb") as stderr:
            pid = _fork(words, environment, stdout, stderr, planted)
        pipe.send(pid)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _fork(
    words: list[str], environment: dict[str, str], stdout: IO[bytes] | None, stderr: IO[bytes] | None, planted: str
) -> int:
    """Run `evodsp *words` in a fork of this process, and return its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        mp.current_process()._config.pop(
            "tempdir", None
        )  # the folder of the tests' processes, which `leave` would remove
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # a new program has no handlers
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, file in ((1, stdout), (2, stderr)):
            if file is not None:
                os.dup2(file.fileno(), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        if "RANK" in environment:
            Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
        code = _evodsp(words, planted)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _evodsp(words: list[str], planted: str) -> int:
    """What `python -m evodsp *words` does. Returns its exit code, if it does not end the process itself."""
    from evodsp.__main__ import run
    from evodsp.launch import launcher

    started = type("Rank", (_Rank,), {"planted": planted})
    launcher.subprocess = SimpleNamespace(Popen=started, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    exec(planted, {})
    sys.argv = ["evodsp", *words]
    try:
        with kept_parsers():
            run()
    except SystemExit as done:
        return int(done.code or 0)


class _Rank(subprocess.Popen[bytes]):
    """A fork in place of the process that the launcher starts."""

    planted = ""

    def __init__(
        self, words: list[str], env: dict[str, str], stdout: IO[bytes] | None, stderr: IO[bytes] | None, **_: Any
    ) -> None:
        self._child_created = False  # nothing to do for subprocess when this object goes
        self.args, self.returncode = words, None
        assert words[:3] == [sys.executable, "-m", "evodsp"]
        self.pid = _fork(words[3:], env, stdout, stderr, self.planted)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
