"""The index of a data set: facts about each chain and the places of its files, found once and shared by all processes.

`evodsp data index` makes it (`evodsp.data.index.scan`). It is a folder of NumPy arrays, one .npy file a column, and
`index.json` with the format's version, the size and CRC-32 of each array and of itself, and the sources with their state at
the scan. Opening it maps the arrays into memory: nothing is parsed, and the workers and ranks of a machine share one copy.
The checksums are compared when it is opened, a second for a gigabyte; copies that travel to workers are only mapped. A chain
is found by bisection over the sorted keys. The folder is renamed into place when it is complete (`evodsp.files`). Paths are
relative to the alignment and structure folders, so that the data may move.

Formats compared: .npy files are written, checked and mapped by NumPy alone, and any program reads them. An .npz archive
cannot be mapped. Arrow's tables can, but pyarrow is 45 MB more in every environment. SQLite and LMDB look up records,
while filters and weights need whole columns, which they would copy into each process. HDF5 does not map files of several
chunks. OpenFold's caches are JSON: 634,434 chains are over a gigabyte of Python objects in each process.
"""

from __future__ import annotations

import json
import shlex
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from evodsp.data.index.chain_table import ChainTable, PackedTexts
from evodsp.data.sources.alignment_database import StoredFile
from evodsp.data.sources.chain_folder import is_alignment
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.files import whole_folder
from evodsp.reading.array_files import map_array
from evodsp.reading.quoting import quoted, shown
from evodsp.reading.text_files import read_json

FORMAT, VERSION = "evodsp index of chains", 1
HEADER = "index.json"
_FIX = "make it again with 'evodsp data index'"
_TEXTS = ("keys", "sequences", "structures", "problems", "file_names", "databases")
_COLUMNS = (
    "lengths", "resolutions", "release_days", "cluster_sizes", "largest_fractions", "unknown_fractions", "representatives",
)  # fmt: skip
_ARRAYS = ("chain_databases", "first_files", "file_name_rows", "file_offsets", "file_lengths")
_FILES = (*_COLUMNS, *_ARRAYS, *(f"{name}.{part}" for name in _TEXTS for part in ("starts", "letters")))
_REAL = ("resolutions", "largest_fractions", "unknown_fractions")
_OWN = "crc32"
"""Entry of the header: the checksum of its other entries."""
_NEAREST_AMONG = 100_000
"""A misspelt key is compared with at most this many keys."""
FOLDER_OF_ITS_OWN = -1
"""Entry of `chain_databases` for a chain whose alignments lie in a folder of their own, or that has none."""
EMPTY_FOLDER = -2
"""Entry of `chain_databases` for a chain whose folder is empty: its sequence is its MSA."""


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
class IndexContent:
    """The arrays of an index. Rows are chains, in the order of their keys; n chains have m files."""

    table: ChainTable
    sequences: PackedTexts
    """One-letter codes, '' if unknown."""
    structures: PackedTexts
    """Structure file of each chain's entry, relative to the structure folder; '' if there is none."""
    problems: PackedTexts
    """The reason why a chain's header or first alignment could not be read; '' if it could, or was not needed."""
    databases: PackedTexts
    """Names of OpenFold's databases in the alignment folder."""
    file_names: PackedTexts
    """The distinct names of files, such as `bfd_uniclust_hits.a3m`, relative to the chain's folder."""
    chain_databases: Int32[np.ndarray, " n"]
    """Each chain's row of `databases`, FOLDER_OF_ITS_OWN or EMPTY_FOLDER."""
    first_files: Int64[np.ndarray, " n_plus_1"]
    """The files of row i are those from first_files[i] to first_files[i + 1]."""
    file_name_rows: Int32[np.ndarray, " m"]
    """Each file's row of `file_names`."""
    file_offsets: Int64[np.ndarray, " m"]
    """Each file's first byte in the database; 0 in a folder."""
    file_lengths: Int64[np.ndarray, " m"]
    """Each file's number of bytes."""


class ChainIndex:
    """An open index. Pickling transfers only its path."""

    def __init__(self, path: str | Path) -> None:
        """Map the index into memory. Raises UserError if it is missing, damaged, or of another format or version."""
        self._map(Path(path))
        self.check()

    @classmethod
    def _copy(cls, path: Path) -> ChainIndex:
        """An index that another process has checked."""
        made = cls.__new__(cls)
        made._map(path)
        return made

    def _map(self, path: Path) -> None:
        self.path = path
        self._header = _read_header(path)
        arrays = {name: self._array(name) for name in _FILES}
        try:
            self.sources = [Source(**source) for source in self._header["sources"]]
            """The folders and files that were scanned."""
            self.obsolete: Mapping[str, str | None] = dict(self._header["obsolete"])
            """Withdrawn entry -> the entry that replaces it, or None; in lower case."""
            if not all(isinstance(entry, str | None) for entry in self.obsolete.values()):
                raise TypeError("an obsolete entry that is no text")
            texts = {name: PackedTexts(arrays[f"{name}.starts"], arrays[f"{name}.letters"]) for name in _TEXTS}
            self.keys = texts.pop("keys")
            table = ChainTable(self.keys, **{name: arrays[name] for name in _COLUMNS})
            columns: dict[str, Any] = {**texts, **{name: arrays[name] for name in _ARRAYS}}
            self.content = IndexContent(table, **columns)
        except (KeyError, ValueError, TypeError) as error:
            raise FileFormatError(self.path, f"its parts do not fit together ({quoted(error)}); {_FIX}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._copy, (self.path,)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def table(self) -> ChainTable:
        return self.content.table

    @property
    def command(self) -> str:
        """The command that makes this index again."""
        options = (f"--{source.option} {shlex.quote(source.path)}" for source in self.sources)
        return f"evodsp data index {' '.join(options)} --output {shlex.quote(str(self.path))} --overwrite"

    def row(self, key: str) -> int:
        """The row of a chain. Raises UserError, with the nearest key, if the index does not have it."""
        found = self.keys.find(key)
        if found is None:
            near = nearest(key, self.keys[:]) if len(self) <= _NEAREST_AMONG else ""
            raise UserError(f"{self.path}: no chain '{key}' in the index; make it again or drop the chain.{near}")
        return found

    def sequence(self, row: int) -> str:
        """The chain's one-letter codes; '' if unknown."""
        return self.content.sequences[row]

    def structure(self, row: int) -> str | None:
        """The structure file of the chain's entry, relative to the structure folder."""
        return self.content.structures[row] or None

    def alignment_files(self, row: int) -> tuple[str, str | None, list[StoredFile]]:
        """The place of a chain's alignments and template searches: (key of the chain that owns them, database or None, files
        sorted by name). Without a database they lie in that key's folder."""
        content, owner = self.content, int(self.table.representatives[row])
        files = slice(int(content.first_files[owner]), int(content.first_files[owner + 1]))
        database = int(content.chain_databases[owner])
        return (
            self.keys[owner],
            None if database < 0 else content.databases[database],
            [
                StoredFile(content.file_names[int(name)], int(offset), int(length))
                for name, offset, length in zip(
                    content.file_name_rows[files], content.file_offsets[files], content.file_lengths[files], strict=True
                )
            ],
        )

    def has_alignments(self) -> Bool[np.ndarray, " n"]:
        """Whether a chain, or an identical one, has alignments, or an empty folder of them."""
        return own_alignments(self.content)[self.table.representatives] | self.are_query_only()

    def are_query_only(self) -> Bool[np.ndarray, " n"]:
        """Whether a chain's sequence is its MSA: its folder is empty, and no identical chain has alignments."""
        has_lender = self.table.representatives != np.arange(len(self))
        return np.asarray(self.content.chain_databases == EMPTY_FOLDER) & ~has_lender

    def has_empty_folder(self, row: int) -> bool:
        """Whether the chain's folder of alignments is empty."""
        return int(self.content.chain_databases[row]) == EMPTY_FOLDER

    def has_structure(self) -> Bool[np.ndarray, " n"]:
        """Whether the chain's entry has a structure file."""
        return self.content.structures.lengths() > 0

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
        for name in _FILES:
            path = self.path / f"{name}.npy"
            if _checksum(path) != self._header["arrays"][name].get("crc32"):
                raise FileFormatError(path, f"damaged: its checksum is not the one in {HEADER}; {_FIX}")
        for name, fits in _fitting(self.content):
            if not fits:
                raise FileFormatError(self.path, f"its {name} do not fit to its other columns; {_FIX}")

    def _array(self, name: str) -> np.ndarray:
        path, expected = self.path / f"{name}.npy", self._header["arrays"].get(name)
        size = path.stat().st_size if path.is_file() else None
        if not isinstance(expected, dict) or size is None or size != expected.get("bytes"):
            raise FileFormatError(path, f"missing, truncated or of another index than {HEADER}; {_FIX}")
        array = map_array(path, _FIX)
        if array.ndim != 1 or array.dtype.kind not in ("f" if name in _REAL else "iu"):
            raise FileFormatError(path, f"an array of shape {array.shape} and type {array.dtype}; {_FIX}")
        return array


def _fitting(content: IndexContent) -> Iterator[tuple[str, bool]]:
    """Each part of an index, and whether its rows fit the other parts."""
    table, chains, files = content.table, len(content.table.keys), len(content.file_name_rows)
    for name in _COLUMNS:
        yield name, len(getattr(table, name)) == chains
    for name in ("sequences", "structures", "problems"):
        yield name, len(getattr(content, name)) == chains
    for name in ("keys", *(name for name in _TEXTS if name != "keys")):
        texts = table.keys if name == "keys" else getattr(content, name)
        yield name, not isinstance(texts, PackedTexts) or bool((texts.lengths() >= 0).all())
    yield "representatives", _within(table.representatives, 0, chains)
    yield "chain_databases", len(content.chain_databases) == chains
    yield "chain_databases", _within(content.chain_databases, EMPTY_FOLDER, len(content.databases))
    first = content.first_files
    yield (
        "first_files",
        len(first) == chains + 1 and first[0] == 0 and first[-1] == files and bool((np.diff(first) >= 0).all()),
    )
    yield "file_name_rows", _within(content.file_name_rows, 0, len(content.file_names))
    for name in ("file_offsets", "file_lengths"):
        yield name, len(getattr(content, name)) == files and _within(getattr(content, name), 0, np.iinfo(np.int64).max)


def _within(numbers: np.ndarray, lowest: int, end: int) -> bool:
    return not numbers.size or bool(numbers.min() >= lowest and numbers.max() < end)


def own_alignments(content: IndexContent) -> Bool[np.ndarray, " n"]:
    """Whether each chain has alignments of its own."""
    is_one = np.array([is_alignment(Path(name).name) for name in content.file_names], bool)
    before = np.concatenate([[0], np.cumsum(is_one[content.file_name_rows])])
    return np.asarray(before[content.first_files[1:]] > before[content.first_files[:-1]])


def write_index(path: Path, content: IndexContent, sources: list[Source], obsolete: Mapping[str, str | None]) -> None:
    """Write an index, replacing an earlier one in one step."""
    arrays: dict[str, np.ndarray] = {name: getattr(content.table, name) for name in _COLUMNS}
    arrays |= {name: getattr(content, name) for name in _ARRAYS}
    keys = content.table.keys if isinstance(content.table.keys, PackedTexts) else PackedTexts.of(content.table.keys)
    for name in _TEXTS:
        texts = keys if name == "keys" else getattr(content, name)
        arrays |= {f"{name}.starts": texts.starts, f"{name}.letters": texts.letters}
    with whole_folder(path) as folder:
        written = {}
        for name, array in sorted(arrays.items()):
            file = folder / f"{name}.npy"
            np.save(file, array, allow_pickle=False)
            written[name] = {"bytes": file.stat().st_size, "crc32": _checksum(file)}
        header = {
            "format": FORMAT,
            "version": VERSION,
            "chains": len(keys),
            "sources": [vars(source) for source in sources],
            "arrays": written,
            "obsolete": dict(sorted(obsolete.items())),
        }
        header = {**header, _OWN: _header_checksum(header)}
        (folder / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")


def is_index(path: Path) -> bool:
    """Whether the folder holds an index of any version."""
    return (path / HEADER).is_file()


def _read_header(path: Path) -> dict[str, Any]:
    if not is_index(path):
        what = "there is nothing there" if not path.exists() else f"it has no {HEADER}"
        raise UserError(f"{path}: not an index of chains, {what}; {_FIX}")
    header = read_json(path / HEADER, _FIX)
    if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("arrays"), dict):
        raise FileFormatError(path / HEADER, f"not the header of an index of chains; {_FIX}")
    if header.get("version") != VERSION:
        found = header.get("version")
        raise FileFormatError(
            path / HEADER, f"version {shown(found)} of the format, but this evodsp reads version {VERSION}; {_FIX}"
        )
    if _OWN in header and header[_OWN] != _header_checksum(header):  # earlier versions wrote none
        raise FileFormatError(path / HEADER, f"damaged: its checksum is not the one it was written with; {_FIX}")
    return header


def _header_checksum(header: Mapping[str, Any]) -> int:
    """The checksum of all other entries."""
    others = {name: value for name, value in header.items() if name != _OWN}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
