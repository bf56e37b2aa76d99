"""Reports output paths that cannot be written: before the work starts if possible, and in one line instead of a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evodsp.errors import UserError

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
