"""A folder of columns: NumPy arrays, one .npy file each, and `index.json` with the format's name and version, the size and
CRC-32 of each array and of itself, and the sources with their state at the scan.

Opening it maps the arrays into memory: nothing is parsed, and the workers and ranks of a machine share one copy. The checksums
are compared when it is opened, a second for a gigabyte; copies that travel to workers are only mapped. The folder is renamed
into place when it is complete (`evodsp.files`).
"""

from __future__ import annotations

import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64

from evodsp.data.index.chain_table import ChainTable, PackedTexts
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.files import whole_folder
from evodsp.reading.array_files import map_array
from evodsp.reading.quoting import quoted, shown
from evodsp.reading.text_files import read_json

HEADER = "index.json"
FIX = "make it again with 'evodsp data index'"
TABLE_COLUMNS = (
    "lengths", "resolutions", "release_days", "cluster_sizes", "largest_fractions", "unknown_fractions", "representatives",
)  # fmt: skip
"""The columns of `ChainTable` but its keys."""
_REAL = ("resolutions", "largest_fractions", "unknown_fractions")
_PREFIX = "evodsp index of "
_OWN = "crc32"
"""Entry of the header: the checksum of its other entries."""
_NEAREST_AMONG = 100_000
"""A misspelt key is compared with at most this many keys."""


@dataclass(frozen=True)
class Source:
    """A folder or file that was scanned, and its state then: mtime in ns, bytes (0 for a folder)."""

    option: str
    """The option of `evodsp data index` that named it."""
    path: str
    mtime_ns: int
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.option, str) or not isinstance(self.path, str):
            raise TypeError("a source without a path")

    @classmethod
    def of(cls, option: str, path: Path) -> Source:
        """The source in its present state. Raises OSError if it is not there."""
        found = path.stat()
        return cls(option, str(path), found.st_mtime_ns, 0 if path.is_dir() else found.st_size)


@dataclass(frozen=True)
class Format:
    """A kind of index."""

    rows: str
    """What its rows are, such as chains."""
    options: str
    """The options of `evodsp data index` that make this kind, each after a blank."""
    texts: tuple[str, ...]
    """Its columns of texts, `keys` first."""
    arrays: tuple[str, ...]
    """Its columns of whole numbers, besides those of `ChainTable`."""
    version: int = 1

    @property
    def name(self) -> str:
        return f"{_PREFIX}{self.rows}"

    @property
    def files(self) -> tuple[str, ...]:
        parts = (f"{name}.{part}" for name in self.texts for part in ("starts", "letters"))
        return (*TABLE_COLUMNS, *self.arrays, *parts)


@runtime_checkable
class Columns(Protocol):
    """The columns of an index. Every kind has these texts."""

    @property
    def structures(self) -> PackedTexts:
        """Structure file of each row's entry, relative to the structure folder; '' if there is none."""

    @property
    def problems(self) -> PackedTexts:
        """The reason why the files of a row could not be read; '' if they could, or were not needed."""


class Index(ABC):
    """An open index. Pickling transfers only its path."""

    FORMAT: Format
    content: Columns

    def __init__(self, path: str | Path) -> None:
        """Map the index into memory. Raises UserError if it is missing, damaged, or of another format or version."""
        self._map(Path(path))
        self.check()

    @classmethod
    def _copy(cls, path: Path) -> Index:
        """An index that another process has checked."""
        made = cls.__new__(cls)
        made._map(path)
        return made

    def _map(self, path: Path) -> None:
        self.path = path
        self._header = _read_header(path, self.FORMAT)
        arrays = {name: self._array(name) for name in self.FORMAT.files}
        try:
            self.sources = [Source(**source) for source in self._header["sources"]]
            """The folders and files that were scanned."""
            texts = {
                name: PackedTexts(arrays[f"{name}.starts"], arrays[f"{name}.letters"]) for name in self.FORMAT.texts
            }
            self.keys = texts.pop("keys")
            self.table = ChainTable(self.keys, **{name: arrays[name] for name in TABLE_COLUMNS})
            self.obsolete: Mapping[str, str | None] = dict(self._header.get("obsolete", {}))
            """Withdrawn entry -> the entry that replaces it, or None; in lower case."""
            if not all(isinstance(entry, str | None) for entry in self.obsolete.values()):
                raise TypeError("an obsolete entry that is no text")
            self._take(self._header, {**texts, **{name: arrays[name] for name in self.FORMAT.arrays}})
        except (KeyError, ValueError, TypeError) as error:
            raise FileFormatError(self.path, f"its parts do not fit together ({quoted(error)}); {FIX}") from error

    def frequencies(self) -> Float64[np.ndarray, " n"]:
        """The frequency with which `sampling: alphafold2` takes each row, in any unit."""
        return self.table.frequencies()

    @abstractmethod
    def _take(self, header: Mapping[str, Any], columns: dict[str, Any]) -> None:
        """Keep the columns of this kind of index. Raises KeyError, ValueError or TypeError if they do not fit together."""

    @abstractmethod
    def _fitting(self) -> Iterator[tuple[str, bool]]:
        """Each part of this kind of index, and whether its rows fit the other parts."""

    @abstractmethod
    def sequences_of(self, row: int) -> tuple[str, ...]:
        """The one-letter codes of the row's chains; none if they are unknown."""

    @property
    def problems(self) -> PackedTexts:
        """See `Columns`."""
        return self.content.problems

    def structure(self, row: int) -> str | None:
        """The structure file of the row's entry, relative to the structure folder; None if there is none."""
        return self.content.structures[row] or None

    def has_structure(self) -> Bool[np.ndarray, " n"]:
        """Whether the entry of each row has a structure file."""
        return self.content.structures.lengths() > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._copy, (self.path,)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def command(self) -> str:
        """The command that makes this index again."""
        options = (f"--{source.option} {shlex.quote(source.path)}" for source in self.sources)
        output = shlex.quote(str(self.path))
        return f"evodsp data index{self._options} {' '.join(options)} --output {output} --overwrite"

    @property
    def _options(self) -> str:
        return self.FORMAT.options

    def row(self, key: str) -> int:
        """The row of a key. Raises UserError, with the nearest key, if the index does not have it."""
        found = self.keys.find(key)
        if found is None:
            near = nearest(key, self.keys[:]) if len(self) <= _NEAREST_AMONG else ""
            what = self.FORMAT.rows.removesuffix("s")
            raise UserError(f"{self.path}: no {what} '{key}' in the index; make it again or drop the {what}.{near}")
        return found

    def stale_sources(self, at: Mapping[str, Path] | None = None) -> list[str]:
        """The sources, as 'option path', that have changed since. `at`: the present paths of sources that moved, by option.

        Sources that are gone do not count: an index may be used without its caches.
        """
        stale = []
        for source in self.sources:
            path = (at or {}).get(source.option, Path(source.path))
            try:
                now = Source.of(source.option, path)
            except OSError:
                continue
            if (now.mtime_ns, now.bytes) != (source.mtime_ns, source.bytes):
                stale.append(f"{source.option} {path}")
        return stale

    def check(self) -> None:
        """Read every array and raise FileFormatError unless it has the checksum with which it was written, and its rows fit
        the other arrays."""
        for name in self.FORMAT.files:
            path = self.path / f"{name}.npy"
            if _checksum(path) != self._header["arrays"][name].get("crc32"):
                raise FileFormatError(path, f"damaged: its checksum is not the one in {HEADER}; {FIX}")
        for name, fits in (*self._fitting_always(), *self._fitting()):
            if not fits:
                raise FileFormatError(self.path, f"its {name} do not fit to its other columns; {FIX}")

    def _fitting_always(self) -> Iterator[tuple[str, bool]]:
        for name in TABLE_COLUMNS:
            yield name, len(getattr(self.table, name)) == len(self)
        for name in self.FORMAT.texts:
            texts: PackedTexts = self.keys if name == "keys" else getattr(self.content, name)
            yield name, bool((texts.lengths() >= 0).all())
        for name in ("structures", "problems"):
            yield name, len(getattr(self.content, name)) == len(self)
        yield "representatives", within(self.table.representatives, 0, len(self))

    def _array(self, name: str) -> np.ndarray:
        path, expected = self.path / f"{name}.npy", self._header["arrays"].get(name)
        size = path.stat().st_size if path.is_file() else None
        if not isinstance(expected, dict) or size is None or size != expected.get("bytes"):
            raise FileFormatError(path, f"missing, truncated or of another index than {HEADER}; {FIX}")
        array = map_array(path, FIX)
        if array.ndim != 1 or array.dtype.kind not in ("f" if name in _REAL else "iu"):
            raise FileFormatError(path, f"an array of shape {array.shape} and type {array.dtype}; {FIX}")
        return array


def fitting_parts(first: np.ndarray, rows: int, parts: int) -> bool:
    """Whether the parts of row i can be those from first[i] to first[i + 1]."""
    fits = len(first) == rows + 1 and first[0] == 0 and first[-1] == parts
    return bool(fits and (np.diff(first) >= 0).all())


def within(numbers: np.ndarray, lowest: int, end: int) -> bool:
    """Whether all numbers are at least `lowest` and below `end`."""
    return not numbers.size or bool(numbers.min() >= lowest and numbers.max() < end)


def write_columns(
    path: Path,
    kind: Format,
    table: ChainTable,
    content: Columns,
    sources: list[Source],
    more: Mapping[str, Any],
) -> None:
    """Write an index, replacing an earlier one in one step. `more`: further entries of the header."""
    columns = {name: getattr(table, name) for name in TABLE_COLUMNS}
    columns |= {name: getattr(content, name) for name in kind.arrays}
    keys = table.keys if isinstance(table.keys, PackedTexts) else PackedTexts.of(table.keys)
    for name in kind.texts:
        packed = keys if name == "keys" else getattr(content, name)
        columns |= {f"{name}.starts": packed.starts, f"{name}.letters": packed.letters}
    with whole_folder(path) as folder:
        written = {}
        for name, array in sorted(columns.items()):
            file = folder / f"{name}.npy"
            np.save(file, array, allow_pickle=False)
            written[name] = {"bytes": file.stat().st_size, "crc32": _checksum(file)}
        header = {
            "format": kind.name,
            "version": kind.version,
            kind.rows: len(keys),
            "sources": [vars(source) for source in sources],
            "arrays": written,
            **more,
        }
        header = {**header, _OWN: _header_checksum(header)}
        (folder / HEADER).write_text(dumps(header, indent=1) + "\n", encoding="utf-8")


def is_index(path: Path) -> bool:
    """Whether the folder holds an index of any kind and version."""
    return (path / HEADER).is_file()


def rows_of_index(path: Path) -> str | None:
    """What the rows of an index are, such as chains, by its header; None if there is no index. Nothing else is checked."""
    header = read_json(path / HEADER, FIX) if is_index(path) else None
    name = header.get("format") if isinstance(header, dict) else None
    return name.removeprefix(_PREFIX) if isinstance(name, str) and name.startswith(_PREFIX) else None


def _read_header(path: Path, kind: Format) -> dict[str, Any]:
    if not is_index(path):
        what = "there is nothing there" if not path.exists() else f"it has no {HEADER}"
        raise UserError(f"{path}: not an index of {kind.rows}, {what}; {FIX}")
    header = read_json(path / HEADER, FIX)
    if (rows := rows_of_index(path)) != kind.rows or not isinstance(header.get("arrays"), dict):
        what = "" if rows in (None, kind.rows) else f", but of {quoted(str(rows))}"
        message = (
            f"not the header of an index of {kind.rows}{what}; make it again with 'evodsp data index{kind.options}'"
        )
        raise FileFormatError(path / HEADER, message)
    if header.get("version") != kind.version:
        found = header.get("version")
        raise FileFormatError(
            path / HEADER, f"version {shown(found)} of the format, but this evodsp reads version {kind.version}; {FIX}"
        )
    if _OWN in header and header[_OWN] != _header_checksum(header):  # earlier versions wrote none
        raise FileFormatError(path / HEADER, f"damaged: its checksum is not the one it was written with; {FIX}")
    return header


def _header_checksum(header: Mapping[str, Any]) -> int:
    """The checksum of all other entries."""
    others = {name: value for name, value in header.items() if name != _OWN}
    return zlib.crc32(dumps(others, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
