"""Writes files and folders that are either complete or absent: they are written under a temporary name, then renamed.

The temporary name lies beside the target, because a rename replaces its target in one step only within one file system. A
process that is killed leaves at most a hidden `.<name>.<pid>.partial`; the target is then as it was before.
`remove_partial` removes these leftovers.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


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
