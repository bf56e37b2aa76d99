"""Files and folders: written as a whole, tables, output paths that can be written, and locks.

A file or folder is complete or absent: it is written under a temporary name, then renamed. The temporary name lies beside
the target, because a rename replaces its target in one step only within one file system. A process that is killed leaves at
most a hidden `.<name>.<pid>.partial`; the target is then as it was before. `remove_partial` removes these leftovers.

Output paths that cannot be written are reported before the work starts if possible, and in one line instead of a traceback.

A lock lets one process at a time work in a folder. Its file is locked by the kernel and names the lock's holder. The file is
locked with flock for as long as the work takes. The kernel gives the lock to one process, also if several claim the lock of
a killed one, and releases it when the process ends in any way, also in another container of the machine. lockf is not used,
because a process loses that lock when any of its parts closes the file, such as a logger that copies the folder. A weakness
of flock is that a forked child keeps it; the message then says so. filelock waits, but does not say for whom.

Of machines that share a folder, NFS and most parallel file systems give the lock to one process of all of them; others give
one to each machine. Therefore the file names its holder too (host, process, SLURM job) and is touched every minute. While it
is, other machines leave it alone, even if their kernel would give them the lock. Where a file system knows no flock (Lustre
that is mounted without it) the file alone decides, and of those that write it at one moment the last goes on. A file that is
empty or torn, as a full disk leaves it, names nobody.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.printing import printable, tell


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` when the block succeeds.

    If the block raises, the temporary file is removed and an existing `path` is kept. Missing parent folders are created. If
    `path` is a link, the file that it points to is replaced. Raises OSError if `path` is a device or a pipe, which a rename
    would remove.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_name(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file of text, in UTF-8 whatever the locale, see `whole_file`."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def write_json_lines(path: Path | None, entries: Sequence[Any]) -> None:
    """Write dataclasses to a whole file, one JSON object a line. `path`: None on a rank that keeps no file.

    Without entries no file is made, and one that exists becomes empty.
    """
    if path is not None and (entries or path.exists()):
        write_text(path, "".join(json.dumps(dataclasses.asdict(entry)) + "\n" for entry in entries))


def digest_of_file(path: Path, kind: str) -> str:
    """The checksum of a file's content, in hexadecimal. `kind`: its name in hashlib, such as sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; rename it to `path` when the block succeeds, replacing an existing folder.

    If the block raises, the temporary folder and the parent folders created for it are removed, and an existing `path` is
    kept. Errors of the file system are raised as OSError: the caller knows which option to name in its message.
    """
    path = Path(path)
    created = [folder for folder in path.parents if not folder.exists()]  # innermost first
    partial = _partial_name(path)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same process id
        partial.mkdir(parents=True)
        yield partial
        _replace_folder(path, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in created:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


_PARTIAL = re.compile(r"\.(.+)\.\d+\.partial")


def remove_partial(folder: Path, names: Collection[str] | None = None) -> None:
    """Delete the partial files and folders that killed processes have left in `folder`: those for the targets `names`;
    None: for all.

    No other process may be writing one of them. Files that cannot be deleted stay.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        found = _PARTIAL.fullmatch(path.name)
        if found is None or (names is not None and found[1] not in names):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _replace_folder(path: Path, new: Path) -> None:
    """Rename the folder `new` to `path`. The old folder is moved aside first and deleted only after the rename."""
    old = new.with_suffix(".old")
    if path.exists():
        path.replace(old)
    try:
        new.replace(path)
    except BaseException:
        if old.exists():
            old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
"""Errors of a full disk, which may not name the file."""


def check_output(path: Path) -> None:
    """Raise UserError if `path` is a device or a pipe, or cannot be created or written because of the folders above it. It
    creates nothing."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"--output {path}: is a device or a pipe, not a file; give another --output")
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if existing != path and not existing.is_dir():
        raise UserError(f"--output {path}: {existing} is a file, not a folder; give another --output")
    if not os.access(existing, os.W_OK | (os.X_OK if existing.is_dir() else 0)):
        raise UserError(f"--output {path}: no permission to write to {existing}; give another --output")


def check_output_folder(path: Path) -> None:
    """`check_output` for an output that is a folder: raise UserError if `path` is a file."""
    if path.is_file():
        raise UserError(f"--output {path}: is a file, but the output is a folder; give another --output")
    check_output(path)


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path`, or about a path above or below it, into a UserError. A full disk counts as well."""
    try:
        yield
    except OSError as error:
        target = Path(os.path.realpath(path))  # Lightning resolves links
        failed = (
            Path(os.path.realpath(os.fsdecode(error.filename))) if isinstance(error.filename, str | bytes) else None
        )
        related = failed is not None and (failed == target or failed in target.parents or target in failed.parents)
        full = error.errno in _OF_THE_DISK
        if (not related and not full) or (failed is None and stdout_fails()):
            raise
        where = "" if failed in (None, target) else f"{failed}: "
        fix = "make room there, or give another --output" if full else "give a writable --output"
        raise UserError(f"--output {path}: {where}{error.strerror}; {fix}") from error


def stdout_fails() -> bool:
    """Whether printing fails because the disk behind a redirection is full. It is called after an error, and prints an
    empty line to find out, because Python forgets the text that it could not write."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


BEAT_S = 60.0
"""Seconds between two signs of life of the holder."""
SILENT_S = 5 * BEAT_S
"""Seconds without a sign of life after which a process of another machine counts as gone."""
SETTLE_S = 0.5
"""On a file system without flock: seconds that a process waits after writing the file for others that write it at the same
moment."""
_WAIT_S = 0.1
_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@contextmanager
def lock(path: Path, output: Path, does: str) -> Iterator[None]:
    """Hold the lock `path`, whose folder is created, for the work on `output`; the file is removed afterwards.

    `does`: the work as a verb, such as 'trains there', for the message of the other process. Raises UserError if another
    process holds the lock, or if the file cannot be written.
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
    """The process that holds the lock `path`, as 'process 7 on node1', or None."""
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
    """Another process holds the lock. `entries`: content of the lock file."""

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
        """Advice for a lock that is held wrongly, which cannot happen on one machine."""
        is_here = self.entries.get("host") == socket.gethostname()
        return "" if is_here else f" (or delete {path}, if that process is gone)"


def _take(path: Path) -> int:
    """Lock the file and write this process's identity into it. Returns its descriptor. Raises _HeldError and OSError."""
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
    """Lock an open file. Returns its content, which names an earlier holder that is gone; None if the file is no longer at
    `path`, because its holder ended and removed it meanwhile. Raises _HeldError."""
    is_locked = _flock(file)
    entries = _read(file)
    if is_locked is False:
        end = time.monotonic() + 1.0
        while not entries and time.monotonic() < end:  # the holder is about to write it
            time.sleep(0.01)
            entries = _read(file)
        raise _HeldError(entries)
    if not _is_at(path, file):
        return None
    if entries and not _is_gone(file, entries, is_locked is True):
        raise _HeldError(entries)
    return entries


def _flock(file: int) -> bool | None:
    """Whether the file is now locked; None if its file system has no such locks."""
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
    """Write this process's identity into the file. Raises _HeldError if another process wrote last, which only happens
    without flock.
    """
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
            path.unlink(missing_ok=True)  # before it is unlocked, because openers look again
        os.close(file)


def _beat(file: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # the file system is unavailable, and the work itself will report it
            os.utime(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _is_gone(file: int, entries: dict[str, Any], is_locked: bool) -> bool:
    """Whether the process that the file names has ended. `is_locked`: whether this process has the kernel's lock."""
    if entries.get("host") == socket.gethostname():
        return is_locked or entries.get("pid") == os.getpid() or not _lives(entries)
    if entries.get("job") and entries.get("job") == _job():
        return True  # the same job, requeued or restarted on another machine
    return time.time() - os.fstat(file).st_mtime > SILENT_S


def _lives(entries: dict[str, Any]) -> bool:
    """Whether a process of this machine is alive."""
    born = _born(entries.get("pid"))
    return born is not None and born == entries.get("born")


def _born(pid: Any) -> str | None:
    """The start time of a process of this machine (in ticks since the machine's), which no later process with the same
    number shares.

    None if there is no such process, or if it has ended and its parent has not noticed (in a container it may never).
    Without /proc only the existence of the process is known.
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
    """The content of the file; empty if the file is empty or torn."""
    try:
        entries = json.loads(os.pread(file, 1 << 16, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows, rounded to 4 decimals, as .csv or .json by the suffix of `path`, whole or not at all."""
    if path.suffix not in (".csv", ".json"):
        raise UserError(f"{path}: scores can be written as .csv or .json, not as '{path.suffix}'; rename it")
    values = [
        {name: round(value, 4) if isinstance(value := row.get(name), float) else value for name in columns}
        for row in rows
    ]
    write_text(path, json.dumps(values, indent=2) + "\n" if path.suffix == ".json" else csv_text(columns, values))


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """A table as CSV: every table that evodsp writes. A text that a spreadsheet would compute, such as the name `=2+3`, begins
    with an apostrophe, which says that it is text."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([map(_csv_cell, columns), *(map(_csv_cell, map(row.get, columns)) for row in rows)])
    return file.getvalue()


def _csv_cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_COMPUTED) else printable(value)


_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that a spreadsheet computes."""
