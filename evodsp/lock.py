"""One process at a time in a folder: a file that the kernel locks, and that says who holds it.

The file is locked with flock for as long as the work takes. The kernel gives the lock to one process, also where several want
what a killed one has left, and takes it back when the process ends in any way, also in another container of the machine. lockf
was not taken: a process loses it when any of its parts closes the file, such as a logger that copies the folder. The weakness
of flock is that a forked child keeps it, which the message then says. filelock waits, but does not say for whom.

Of machines that share a folder, NFS and most parallel file systems give the lock to one process of all of them; others give one
to each machine. Therefore the file names its holder too (host, process, SLURM job) and is touched every minute. While it is,
other machines leave it alone, even if their kernel would give them the lock. Where a file system knows no flock (Lustre that is
mounted without it) the file alone decides, and of those that write it at one moment the last goes on. A file that is empty or
torn, as a full disk leaves it, names nobody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.output import output_errors
from evodsp.printing import tell

BEAT_S = 60.0
"""Seconds between two signs of life."""
SILENT_S = 5 * BEAT_S
"""After so long without one, a process of another machine is gone."""
SETTLE_S = 0.5
"""On a file system without flock: how long a process that wrote the file waits for others that write it at the same moment."""
_WAIT_S = 0.1
_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@contextmanager
def lock(path: Path, output: Path, does: str) -> Iterator[None]:
    """Hold the lock `path`, whose folder is created, for the work on `output`; the file is removed afterwards.

    `does`: what the work is, such as 'trains there', for the other's message. Raises UserError if another process holds the
    lock, or if the file cannot be written.
    """
    with output_errors(output):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = _take(path)
        except _HeldError as held:
            raise UserError(
                f"--output {output}: {held.by} {does}; end it first, or give another --output{held.hint(path)}"
            ) from None
    with _kept(path, file):
        yield


@contextmanager
def waited_lock(path: Path) -> Iterator[None]:
    """Hold the lock `path`, in a folder that exists, as soon as no other process does. Raises OSError for the file."""
    while True:
        try:
            file = _take(path)
            break
        except _HeldError:
            time.sleep(_WAIT_S)
    with _kept(path, file):
        yield


def holder(path: Path) -> str | None:
    """Which process holds the lock `path`, as 'process 7 on node1', or None."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        _take_file(path, file)
    except _HeldError as held:
        return held.by
    finally:
        os.close(file)
    return None


class _HeldError(Exception):
    """Another process holds the lock. `entries`: what the file says of it."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.entries = entries

    @property
    def by(self) -> str:
        if not self.entries:
            return "another process"
        named = f"process {self.entries.get('pid')} on {self.entries.get('host')}"
        if self.entries.get("host") == socket.gethostname() and not _lives(self.entries):
            return f"{named}, or one that it started,"
        return named

    def hint(self, path: Path) -> str:
        """What to do if this is wrong, which it cannot be on one machine."""
        is_here = self.entries.get("host") == socket.gethostname()
        return "" if is_here else f" (or delete {path}, if that process is gone)"


def _take(path: Path) -> int:
    """Lock the file and write into it who we are. Returns its descriptor. Raises _HeldError and OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            left = _take_file(path, file)
            if left is not None:
                if left:
                    gone = f"process {left.get('pid')} on {left.get('host')} is gone"
                    tell(f"evodsp: warning: {path}: {gone}; its lock is taken over")
                _sign(path, file)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _take_file(path: Path, file: int) -> dict[str, Any] | None:
    """Lock an open file. Returns what it says of an earlier holder, which is gone; None if the file is no longer at `path`,
    because its holder ended and removed it meanwhile. Raises _HeldError."""
    is_locked = _flock(file)
    entries = _read(file)
    if is_locked is False:
        end = time.monotonic() + 1.0
        while not entries and time.monotonic() < end:  # its holder is about to write it
            time.sleep(0.01)
            entries = _read(file)
        raise _HeldError(entries)
    if not _is_at(path, file):
        return None
    if entries and not _is_gone(file, entries, is_locked is True):
        raise _HeldError(entries)
    return entries


def _flock(file: int) -> bool | None:
    """Whether the file is locked now; None if its file system knows no such locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _sign(path: Path, file: int) -> None:
    """Write into the file who we are. Raises _HeldError if another process wrote last, which only happens without flock."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid()), "job": _job()}
    content = json.dumps(own).encode()
    try:
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        os.fsync(file)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    if _flock(file) is None:
        time.sleep(SETTLE_S)
        if (found := _read(file)) != own:
            raise _HeldError(found)


@contextmanager
def _kept(path: Path, file: int) -> Iterator[None]:
    """Show that the holder lives until the block ends, then remove the file."""
    own, ended = _read(file), threading.Event()
    beat = threading.Thread(target=_beat, args=[file, ended], name="evodsp lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        if _is_at(path, file) and _read(file) == own:
            path.unlink(missing_ok=True)  # before it is unlocked: who has it open looks again
        os.close(file)


def _beat(file: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # the file system is away: the work itself will say so
            os.utime(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _is_gone(file: int, entries: dict[str, Any], is_locked: bool) -> bool:
    """Whether the process that the file names has ended. `is_locked`: this process has the kernel's lock."""
    if entries.get("host") == socket.gethostname():
        return is_locked or entries.get("pid") == os.getpid() or not _lives(entries)
    if entries.get("job") and entries.get("job") == _job():
        return True  # the same job, requeued or restarted on another machine
    return time.time() - os.fstat(file).st_mtime > SILENT_S


def _lives(entries: dict[str, Any]) -> bool:
    """Whether a process of this machine lives."""
    born = _born(entries.get("pid"))
    return born is not None and born == entries.get("born")


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


def _read(file: int) -> dict[str, Any]:
    """What the file says; nothing if it is empty or torn."""
    try:
        entries = json.loads(os.pread(file, 1 << 16, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
