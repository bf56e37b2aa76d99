"""The lock of an output folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evodsp.errors import UserError
from evodsp.training import run_lock as module
from evodsp.training.run_lock import run_lock


def held_by(folder: Path, **entries: Any) -> Path:
    path = folder / "run.lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 1, "born": "?", "job": None, **entries}))
    return path


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    """Two runs that write one checkpoint; a lock that stays after the run, also after one that failed."""
    other = os.getppid()
    held_by(tmp_path, pid=other, born=module._born(other))
    with pytest.raises(UserError, match=f"process {other} on .* trains there"), run_lock(tmp_path):
        pass
    (tmp_path / "run.lock").unlink()
    with contextlib.suppress(KeyError), run_lock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        raise KeyError
    assert not (tmp_path / "run.lock").exists()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed run that can never be resumed; another process that got its number."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for entries in ({"pid": int(ended.stdout)}, {"pid": os.getppid(), "born": "another time"}):
        held_by(tmp_path, **entries)
        with run_lock(tmp_path):
            pass
        assert (
            f"process {entries['pid']} on {socket.gethostname()} is gone; its lock is taken over"
            in capsys.readouterr().err
        )


def test_the_lock_of_a_process_that_nobody_has_waited_for(tmp_path: Path) -> None:
    """In a container whose first program is no init, a killed rank stays in the list of processes: no run could go on."""
    with subprocess.Popen(["sleep", "100"]) as process:
        held_by(tmp_path, pid=process.pid, born=module._born(process.pid))
        with pytest.raises(UserError, match=f"process {process.pid} "), run_lock(tmp_path):
            pass
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with run_lock(tmp_path):
            pass


def test_a_process_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run that is taken for dead, or a requeued job that is refused because it runs on another node."""
    path = held_by(tmp_path, host="elsewhere", job="7")
    with pytest.raises(UserError, match="on elsewhere trains there"), run_lock(tmp_path):
        pass
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")
        with run_lock(tmp_path):
            pass
    held_by(tmp_path, host="elsewhere")
    os.utime(path, (time.time() - 2 * module.SILENT_S,) * 2)
    with run_lock(tmp_path):
        pass


def test_a_live_run_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run that another machine takes for dead."""
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    with run_lock(tmp_path):
        path = tmp_path / "run.lock"
        os.utime(path, (0, 0))
        end = time.monotonic() + 30
        while path.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
