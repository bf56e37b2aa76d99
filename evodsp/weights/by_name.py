"""AlphaFold2's published parameters by name: from a folder of this machine, or else from a server.

DeepMind publishes all models as one uncompressed archive of 5 GB. Only the wanted model is fetched from it: the archive's
headers say where each file begins, and servers send parts of files. A mirror may also hold the files themselves. Every file is
a zip archive with a CRC-32 of each array, and these are checked; where a folder of the server has a list SHA256SUMS, the
file's sum as well.
"""

from __future__ import annotations

import lzma
import os
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from urllib.error import HTTPError

from evodsp.config import PUBLISHED_MODELS
from evodsp.errors import UserError, nearest
from evodsp.files import digest_of_file, waited_lock
from evodsp.printing import progress, quoted, tell
from evodsp.reading.answers import (
    LARGEST,
    PASSING,
    BadAnswerError,
    check_address,
    content_of,
    fetch_file,
    free_bytes,
    opened,
    size_at,
    usable,
    without_login,
)

NAMES = PUBLISHED_MODELS
"""The models in DeepMind's archive."""
GROUPS = {
    f"all_{kind or 'monomer'}": [name for name in NAMES if name[len("model_1_") :] == kind]
    for kind in ("", "ptm", "multimer_v3")
}
"""Names that stand for the five models of a kind."""
_ARRAYS = "alphafold/"
"""Prefix of the name of each array of DeepMind's."""
PUBLISHED = "https://storage.googleapis.com/alphafold/alphafold_params_2022-12-06.tar"
FOLDER_VARIABLE = "EVODSP_WEIGHTS"
SUMS = "SHA256SUMS"
_HEADER = 512
_MIB = 1 << 20
_MOST_MEMBERS = 1000
"""Most files of an archive; one that has more, or no end, is not DeepMind's."""
_NO_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError, ValueError, struct.error)
"""Errors of the standard library for zip archives that are none: also a password, an unknown method, a wrong number."""


def weights_folder() -> Path:
    """The folder that keeps parameters: $EVODSP_WEIGHTS, or evodsp/weights in the user's folder of caches."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evodsp" / "weights"


def check_name(name: str) -> None:
    """Raise UserError if there is no published model of this name."""
    if name in GROUPS:
        raise UserError(f"{name} is five models, but one is wanted here; name it, such as {GROUPS[name][0]}")
    if name not in NAMES:
        raise UserError(
            f"no published parameters are called '{name}'.{nearest(name, (*NAMES, *GROUPS))} There are {', '.join(NAMES)}, and "
            f"{', '.join(GROUPS)} for the five of a kind; name any other file with --checkpoint"
        )


def models_of(names: Sequence[str]) -> list[str]:
    """The models of these names, each once: all_ptm is model_1_ptm to model_5_ptm. Raises UserError for an unknown name."""
    for name in names:
        if name not in GROUPS:
            check_name(name)
    return list(dict.fromkeys(model for name in names for model in GROUPS.get(name, [name])))


def find_weights(name: str, folder: Path | None = None) -> Path | None:
    """The file of a model, if it is in the folder (None: `weights_folder()`) or its subfolder params, as AlphaFold lays it out.

    Raises UserError if there is no model of this name.
    """
    check_name(name)
    folder = folder or weights_folder()
    places = (folder / _file(name), folder / "params" / _file(name))
    return next((path for path in places if path.is_file()), None)


def need_weights(names: Sequence[str], folder: Path | None = None) -> list[Path]:
    """The files of models. Raises UserError if one is missing, and says how to get it."""
    found = {name: find_weights(name, folder) for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        where = "" if folder is None else f" --output {folder}"
        raise UserError(
            f"{folder or weights_folder()}: no {_file(missing[0])}; get it with "
            f"`evodsp weights fetch {' '.join(missing)}{where}`"
        )
    return [path for path in found.values() if path is not None]


def fetch_weights(
    names: Sequence[str],
    folder: Path | None = None,
    address: str = PUBLISHED,
    say: Callable[[str], None] | None = None,
    hours: float = 6.0,
) -> list[Path]:
    """The files of models; those that are missing are fetched into `folder` (None: `weights_folder()`) first.

    `address`: of an archive (.tar), or of a folder that holds the files. `say`: is told what is fetched, how much and from
    where, before it begins; None: standard error. `hours`: that one model may take. A fetch that was interrupted is continued.
    Processes that want the same file wait for one another. Raises UserError if a file cannot be had; its place stays empty.
    """
    folder, say = folder or weights_folder(), say or tell
    if missing := [name for name in names if find_weights(name, folder) is None]:
        check_address("the address of parameters", address, PUBLISHED)
        for name in missing:
            _fetch(name, folder, address.rstrip("/"), say, 3600 * hours)
    return need_weights(names, folder)


@dataclass(frozen=True)
class _Source:
    """The place of a file: an address, or the bytes from `first` on of an archive there."""

    address: str
    deadline: float
    """Time of `time.monotonic` at which the fetch ends."""
    size: int | None
    first: int | None = None
    sha256: str | None = None

    @property
    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def open_at(self, start: int) -> tuple[HTTPResponse, int]:
        if self.first is None or self.size is None:
            return opened(self.address, start, seconds=self._left, most=LARGEST if self.size is None else self.size)
        answer, begin = opened(self.address, self.first + start, self.first + self.size, self._left, self.size)
        if begin != self.first + start:
            raise _no_parts(without_login(self.address))
        return answer, start


def _fetch(name: str, folder: Path, address: str, say: Callable[[str], None], seconds: float) -> None:
    target, shown = folder / _file(name), without_login(address)
    with _folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with waited_lock(folder / f".{target.name}.lock"):
            if target.is_file():  # another process has fetched it meanwhile
                return
            source = _find(name, address, time.monotonic() + seconds)
            size = "" if source.size is None else f"{source.size / _MIB:,.0f} MiB "
            say(f"{name}: {size}from {shown} to {target}. Parameters of AlphaFold2: DeepMind, licence CC BY 4.0")
            if source.size is not None and (free := free_bytes(folder)) < source.size:
                raise UserError(
                    f"{folder}: {source.size / _MIB:,.0f} MiB are needed and {free / _MIB:,.0f} MiB are free; "
                    "make room, or choose another folder"
                )
            with progress(f"{target.name}, MiB", (source.size or 0) // _MIB) as advance:
                reason = fetch_file(
                    source.open_at,
                    target,
                    source.size,
                    partial(_damage, sha256=source.sha256),
                    _in_mib(advance),
                )
    if reason is not None:
        raise _unreachable(shown, name, reason)
    checked = f"CRC-32 of its arrays{'' if source.sha256 is None else ' and its SHA-256'}"
    say(f"{name}: {target}; checked: {checked}")


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the folder's disk into one line. (Errors of a connection are OSErrors too, and are caught before.)"""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: parameters cannot be kept there ({error.strerror}); choose another folder with ${FOLDER_VARIABLE}, "
            "--weights_folder of `evodsp predict` or --output of `evodsp weights fetch`"
        ) from error


def _find(name: str, address: str, deadline: float) -> _Source:
    """The place of a model's file on the server. Raises UserError if it is not there."""
    try:
        if address.endswith(".tar"):
            return _in_archive(address, _file(name), deadline)
        file = f"{address}/{_file(name)}"
        return _Source(file, deadline, size_at(file), sha256=_sum(address, _file(name), deadline))
    except (BadAnswerError, *PASSING) as error:  # an HTTPError is one of these
        raise _unreachable(without_login(address), name, quoted(getattr(error, "reason", error))) from error


def _in_archive(address: str, file: str, deadline: float) -> _Source:
    """The part of an uncompressed archive that is a file. Reads the headers only."""
    place, shown = 0, without_login(address)
    for _ in range(_MOST_MEMBERS):
        answer, begin = opened(address, place, place + _HEADER, deadline - time.monotonic(), _HEADER)
        with usable(address), answer:
            if begin != place:
                raise _no_parts(shown)
            header = answer.read(_HEADER)
        if not header.strip(b"\0"):
            raise UserError(f"{shown}: the archive has no {file}; give another address")
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise UserError(f"{shown}: not an uncompressed tar archive ({error}); give another address") from error
        if member.size < 0:
            raise UserError(
                f"{shown}: not an uncompressed tar archive (a file of {member.size} bytes); give another address"
            )
        place += _HEADER
        if member.isfile() and Path(member.name).name == file:
            return _Source(address, deadline, member.size, place)
        place += -(-member.size // _HEADER) * _HEADER
    raise UserError(f"{shown}: no {file} among the first {_MOST_MEMBERS:,} files of the archive; give another address")


def _sum(address: str, file: str, deadline: float) -> str | None:
    """The SHA-256 of a file in the server's list; None if it has no list, or none of this file."""
    try:
        answer, _ = opened(f"{address}/{SUMS}", seconds=deadline - time.monotonic(), most=_MIB)
        lines = content_of(address, answer, _MIB).decode("utf-8", "replace").splitlines()
    except HTTPError as error:
        if error.code in (403, 404):
            return None
        raise
    listed = {words[1].lstrip("*./"): words[0].lower() for line in lines if len(words := line.split()) == 2}
    return listed.get(file)


def _damage(path: Path, sha256: str | None) -> str | None:
    """Damage of a file of parameters, or None."""
    if sha256 is not None and (found := digest_of_file(path, "sha256")) != sha256:
        return f"its SHA-256 is {found[:12]}…, but {SUMS} says {sha256[:12]}…"
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > LARGEST:
                return "its arrays unpack to more than any model has"
            if not any(name.startswith(_ARRAYS) for name in archive.namelist()):
                return f"it holds no array of a model (named {_ARRAYS}…)"
            broken = archive.testzip()
    except (*_NO_ZIP, OSError, EOFError) as error:
        return f"it is no .npz file ({quoted(error)})"
    return None if broken is None else f"its array {quoted(broken)} is damaged (CRC-32)"


def _in_mib(advance: Callable[[int], None]) -> Callable[[int], None]:
    """Counts bytes and passes whole MiB on."""
    got = told = 0

    def count(more: int) -> None:
        nonlocal got, told
        got += more
        advance(got // _MIB - told)
        told = got // _MIB

    return count


def _file(name: str) -> str:
    return f"params_{name}.npz"


def _no_parts(address: str) -> UserError:
    return UserError(
        f"{address}: the server does not send parts of files, so one model cannot be taken from the archive; download and "
        "unpack it yourself, and name its folder"
    )


def _unreachable(address: str, name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot be had from {address}: {reason}. Check the network and the address; or put {_file(name)} into a "
        f"folder and name it (${FOLDER_VARIABLE}). The same command continues a fetch that was interrupted"
    )
