"""The lock of an output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evodsp import files as module
from evodsp.errors import UserError
from evodsp.files import holder, lock, waited_lock
from tests.builders.processes import ROOT
from tests.builders.races import race

NOBODY = 4_194_304
"""No process has this number, which is beyond Linux's largest."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)


def held(path: Path) -> contextlib.AbstractContextManager[None]:
    return lock(path, path.parent, "trains there")


def left_by(path: Path, **entries: Any) -> None:
    """What a killed process leaves."""
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": NOBODY, "born": "1", "job": None, **entries}))


@contextlib.contextmanager
def refused(path: Path, by: str) -> Iterator[None]:
    with pytest.raises(UserError, match=rf"^--output {path.parent}: {by} trains there; end it first") as caught:
        yield
    assert "\n" not in str(caught.value)


def test_a_second_one_is_refused(path: Path) -> None:
    """Two runs that write one checkpoint; a lock that stays after the run, also after one that failed."""
    with contextlib.suppress(KeyError), held(path):
        with refused(path, f"process {os.getpid()} on {socket.gethostname()}"), held(path):
            pass
        assert json.loads(path.read_text())["pid"] == os.getpid(), "the second one took the file away"
        raise KeyError
    assert not path.exists()


def test_what_a_killed_process_left_is_taken_over(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed run that can never be resumed, or only when a time is over; another process that got its number."""
    words = [sys.executable, "-c", "import sys; from tests.builders.races import hold; hold(sys.argv[1])", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with refused(path, f"process {process.pid} on {socket.gethostname()}"), held(path):
            pass
        process.send_signal(signal.SIGKILL)
        # Nobody has waited for it, as in a container without init.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with held(path):
            pass
    assert f"process {process.pid} on {socket.gethostname()} is gone; its lock is taken over" in capsys.readouterr().err


def test_a_folder_that_was_copied(path: Path) -> None:
    """A copy of a live run's folder in which nobody can train: its lock names a live process, which trains elsewhere."""
    left_by(path, pid=os.getppid(), born=module._born(os.getppid()))
    with held(path):
        pass


def test_one_of_four_takes_over(tmp_path: Path) -> None:
    """A run that deletes the lock of a dead one when another has taken it over already: two of them train."""
    for number in range(25):
        path = tmp_path / f"{number}.lock"
        left_by(path)
        assert race(lambda path=path: lock(path, tmp_path, "trains there")) == 1


@pytest.mark.parametrize("content", ["", '{"host": "elsewh', "[1]", "[" * 2000])
def test_a_file_that_names_nobody(path: Path, content: str) -> None:
    """A folder that is refused for five minutes by 'process None on None', because the disk was full."""
    path.write_text(content)
    with held(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, or an empty lock that stays."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=rf"{path}: No space left on device; make room"), held(path):
        pass
    assert not path.exists()


def test_a_process_of_another_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run of a file system whose locks other machines do not see, taken for dead; a requeued job that is refused because
    it runs on another node."""
    left_by(path, host="elsewhere", job="7")
    hint = rf"process {NOBODY} on elsewhere trains there; .* \(or delete {path}, if that process is gone\)$"
    with pytest.raises(UserError, match=hint), held(path):
        pass
    assert holder(path) == f"process {NOBODY} on elsewhere"
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")
        with held(path):
            pass
    left_by(path, host="elsewhere")
    os.utime(path, (time.time() - 2 * module.SILENT_S,) * 2)
    assert holder(path) is None
    with held(path):
        pass


def test_a_child_that_its_process_left_behind(path: Path) -> None:
    """A message that names a process that is gone, and nothing that could be ended."""
    with held(path):
        left_by(path)
        with refused(path, f"process {NOBODY} on {socket.gethostname()}, or one that it started,"), held(path):
            pass


def test_a_live_run_shows_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run that another machine takes for dead."""
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    with held(path):
        os.utime(path, (0, 0))
        end = time.monotonic() + 30
        while path.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_a_lock_that_is_removed_before_it_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a file that its holder has just removed, which keeps nobody away."""
    real, removed = fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(path):
        assert removed
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_the_lock_of_another_is_not_removed(path: Path) -> None:
    """A user deletes the file of a run that hangs; when that run ends after all, it takes the next one's lock away."""
    with held(path):
        path.unlink()
        left_by(path, host="elsewhere")
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_a_file_system_without_locks(path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot begin there, or two of them; a killed run that nobody has waited for and that keeps its lock."""
    with subprocess.Popen(["sleep", "100"]) as process:
        left_by(path, pid=process.pid, born=module._born(process.pid))
        with refused(path, f"process {process.pid} on {socket.gethostname()}"), held(path):
            pass
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with held(path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()
    left_by(path, pid=os.getppid(), born="another time")
    with held(path):  # another process got its number
        pass
    left_by(path)
    with monkeypatch.context() as patch:  # another process writes at the same moment, and last
        patch.setattr(module.time, "sleep", lambda _: left_by(path, pid=os.getppid(), born=module._born(os.getppid())))
        with refused(path, f"process {os.getppid()} on {socket.gethostname()}"), held(path):
            pass
    assert path.exists()


@pytest.mark.verify
def test_races_of_processes(request: pytest.FixtureRequest) -> None:
    """Moments at which two processes hold a lock, or a killed one's blocks the next; two scans that make one index."""
    rounds = request.config.getoption("--rounds")
    command = [sys.executable, "-m", "tests.builders.lock_races", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert f"{rounds} rounds of each race: one winner" in done.stdout, done.stderr


def test_who_waits_gets_it(path: Path) -> None:
    """A wait that never ends, or that does not wait."""
    order = []

    def second() -> None:
        with waited_lock(path):
            order.append("second")

    with waited_lock(path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    assert not path.exists()
