"""One run at a time in an output folder: a file that names the process which writes there.

A file, not a lock of the file system, because those of clusters often have none that all machines see. The file is touched
every minute; if its process is gone, or it stands still, the next run takes it over and says so.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.output import output_errors
from evodsp.printing import tell

BEAT_S = 60.0
"""Seconds between two signs of life."""
SILENT_S = 5 * BEAT_S
"""After so long without one, a process of another machine is gone."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is created. Raises UserError if another run holds it, or the folder is not writable."""
    path = folder / "run.lock"
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _take(path)
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=[path, ended], name="evodsp run lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        if _read(path).get("pid") == os.getpid():
            path.unlink(missing_ok=True)


def _take(path: Path) -> None:
    own = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid()), "job": _job()}
    for _ in range(2):
        try:
            with path.open("x") as file:
                json.dump(own, file)
            return
        except FileExistsError:
            holder = _read(path)
            if not _is_gone(path, holder):
                raise UserError(
                    f"--output {path.parent}: process {holder.get('pid')} on {holder.get('host')} trains there; end it first, "
                    f"or give another --output (or delete {path}, if that run is gone)"
                ) from None
            tell(
                f"evodsp: warning: {path}: process {holder.get('pid')} on {holder.get('host')} is gone; its lock is taken over"
            )
            path.unlink(missing_ok=True)
    raise UserError(f"--output {path.parent}: another run began there at the same moment; give another --output")


def _is_gone(path: Path, holder: dict[str, Any]) -> bool:
    """Whether the process that wrote the lock has ended."""
    if holder.get("host") == socket.gethostname():
        return holder.get("pid") == os.getpid() or _born(holder.get("pid")) != holder.get("born")
    if holder.get("job") and holder.get("job") == _job():
        return True  # the same job, requeued or restarted on another machine
    try:
        return time.time() - path.stat().st_mtime > SILENT_S
    except FileNotFoundError:
        return True


def _born(pid: Any) -> str | None:
    """When a process of this machine began (in ticks since the machine did), which a later process of the same number did not.

    None if there is no such process, or if it has ended and its parent has not noticed (in a container it may never). A system
    without /proc knows only whether there is one.
    """
    try:
        entries = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if entries[0] == "Z" else entries[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return None
    except PermissionError:
        pass
    return "alive"


def _job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def _read(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        try:
            os.utime(path)
        except OSError:  # deleted, or the file system is away: the run itself will say so
            continue
