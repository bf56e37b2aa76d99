"""The index of a data set: what each key stands for, facts about it, and the places of its files, found once and shared by all
processes.

`evodsp data index` makes it (`evodsp.data.index.scan`). A row is a key: a chain, or an entry and the chains of its assembly. It
is a folder of columns: NumPy arrays, one .npy file each, and `index.json` with the format's name and version, the size and
CRC-32 of each array and of itself, and the sources with their state at the scan. A key is found by bisection. Paths are
relative to the alignment and structure folders, so that the data may move.

Opening it maps the arrays into memory: nothing is parsed, and the workers and ranks of a machine share one copy. The checksums
are compared when it is opened, a second for a gigabyte; copies that travel to workers are only mapped. The folder is renamed
into place when it is complete (`evodsp.files`).

Formats compared: .npy files are written, checked and mapped by NumPy alone, and any program reads them. An .npz archive
cannot be mapped. Arrow's tables can, but pyarrow is 45 MB more in every environment. SQLite and LMDB look up records,
while filters and weights need whole columns, which they would copy into each process. HDF5 does not map files of several
chunks. OpenFold's caches are JSON: 634,434 chains are over a gigabyte of Python objects in each process.
"""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from evodsp.data.index.metadata import ChainTable, PackedTexts, frequencies_of_entries
from evodsp.data.records import CHAINS, COMPLEXES, ONE_OF, Kind
from evodsp.data.sources.layout import StoredFile, files_of_chain
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.files import whole_folder
from evodsp.printing import quoted, shown
from evodsp.reading.array_files import map_array
from evodsp.reading.text_files import read_json

HEADER = "index.json"
VERSION = 4
FIX = "make it again with 'evodsp data index'"
TABLE_COLUMNS = tuple(column.name for column in fields(ChainTable)[1:])
_REAL = ("resolutions", "largest_fractions", "unknown_fractions")
_FORMAT = "evodsp index"
_OWN = "crc32"
"""Entry of the header: the checksum of its other entries."""
_NEAREST_AMONG = 100_000
"""A misspelt key is compared with at most this many keys."""
NO_OWNER = -1
"""Entry of `chain_owners` for a chain without alignments."""
FOLDER_OF_ITS_OWN = -1
"""Entry of `owner_databases` for a chain whose alignments lie in a folder of their own."""
EMPTY_FOLDER = -2
"""Entry of `owner_databases` for a chain whose folder is empty: its sequence is its MSA."""


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
    """The columns of an index of n keys, which stand for m chains, and of o chains that own f files."""

    table: ChainTable
    """The facts about each key. Of a complex the length is that of all chains, the shares of residue types are those of all
    chains together, and the cluster is the smallest of its chains."""
    structures: PackedTexts
    """Structure file of each key's entry, relative to the structure folder; '' if there is none."""
    problems: PackedTexts
    """The reason why a key's files could not be read, or which of its chains have no alignments; '' if all is well."""
    chain_names: PackedTexts
    """The name of each chain, as in `Assembly`."""
    sequences: PackedTexts
    """The one-letter codes of each chain; '' if unknown."""
    owners: PackedTexts
    """The keys of the chains that have alignments of their own, or an empty folder for them; sorted."""
    databases: PackedTexts
    """Names of OpenFold's databases in the alignment folder."""
    file_names: PackedTexts
    """The distinct names of files, such as `bfd_uniclust_hits.a3m`, relative to the chain's folder."""
    first_chains: Int64[np.ndarray, " n_plus_1"]
    """The chains of row i are those from first_chains[i] to first_chains[i + 1]; none of a complex that cannot be read."""
    chain_clusters: Int64[np.ndarray, " m"]
    """The number of chains in each chain's sequence cluster, itself included; `UNKNOWN_CLUSTER` if unknown."""
    chain_owners: Int32[np.ndarray, " m"]
    """The row of `owners` whose alignments each chain has, or NO_OWNER."""
    owner_databases: Int32[np.ndarray, " o"]
    """Each owner's row of `databases`, FOLDER_OF_ITS_OWN or EMPTY_FOLDER."""
    first_files: Int64[np.ndarray, " o_plus_1"]
    """The files of owner k are those from first_files[k] to first_files[k + 1]."""
    file_name_rows: Int32[np.ndarray, " f"]
    """Each file's row of `file_names`."""
    file_offsets: Int64[np.ndarray, " f"]
    """Each file's first byte in the database; 0 in a folder."""
    file_lengths: Int64[np.ndarray, " f"]
    """Each file's number of bytes."""


_TEXTS = ("structures", "problems", "chain_names", "sequences", "owners", "databases", "file_names")
_ARRAYS = (
    "first_chains", "chain_clusters", "chain_owners", "owner_databases", "first_files", "file_name_rows", "file_offsets",
    "file_lengths",
)  # fmt: skip
_FILES = (
    *TABLE_COLUMNS,
    *_ARRAYS,
    *(f"{name}.{part}" for name in ("keys", *_TEXTS) for part in ("starts", "letters")),
)


@dataclass(frozen=True)
class ListedChains:
    """The chains of a row, in the order of its assembly."""

    names: tuple[str, ...]
    sequences: tuple[str, ...]
    owners: tuple[str, ...]
    """The key of the chain whose alignments each chain has; '' if there are none."""

    @property
    def entities(self) -> dict[str, int]:
        """The copies of each sequence."""
        return {letters: self.sequences.count(letters) for letters in self.sequences}


class ListedFiles(NamedTuple):
    """The alignments and template searches of a chain."""

    owner: str
    """The key of the chain that has them."""
    database: str
    """The database that has them; '' if they lie in the owner's folder."""
    files: list[StoredFile]
    """Sorted by name."""
    is_empty: bool
    """Whether the owner's folder is empty."""


def in_words(assembly: str | None) -> str:
    """An assembly in words that settings have, too."""
    return "the asymmetric unit (null)" if assembly is None else f"assembly {assembly}"


class DataIndex:
    """An open index. Pickling transfers only its path.

    `kind`: what its keys have to stand for; None: either. Raises UserError if it is missing, damaged, of another version, or
    of another kind.
    """

    def __init__(self, path: str | Path, kind: Kind | None = CHAINS) -> None:
        self._map(Path(path))
        if kind not in (None, self.kind):
            raise UserError(
                f"{path}: not an index of {kind}, but of {self.kind}; make it again with 'evodsp data index"
                f"{_OPTIONS[kind]}'"
            )
        self.check()

    @classmethod
    def _copy(cls, path: Path) -> DataIndex:
        """An index that another process has checked."""
        made = cls.__new__(cls)
        made._map(path)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._copy, (self.path,)

    def _map(self, path: Path) -> None:
        self.path = path
        self._header = _read_header(path)
        arrays = {name: self._array(name) for name in _FILES}
        try:
            self.sources = [Source(**source) for source in self._header["sources"]]
            """The folders and files that were scanned."""
            self.obsolete: Mapping[str, str | None] = dict(self._header["obsolete"])
            """Withdrawn entry -> the entry that replaces it, or None; in lower case."""
            self.kind: Kind = self._header["of"]
            """Kind of the keys."""
            self.assembly: str | None = self._header["assembly"]
            """The biological assembly of complexes; None: the asymmetric unit."""
            if not all(isinstance(entry, str | None) for entry in (self.assembly, *self.obsolete.values())):
                raise TypeError("an entry that is no text")
            if not isinstance(self.kind, str) or self.kind not in ONE_OF:
                raise ValueError(f"an index of {shown(self.kind)}")
            packed: dict[str, Any] = {
                name: PackedTexts(arrays[f"{name}.starts"], arrays[f"{name}.letters"]) for name in ("keys", *_TEXTS)
            }
            self.keys = packed.pop("keys")
            self.table = ChainTable(self.keys, **{name: arrays[name] for name in TABLE_COLUMNS})
            columns: dict[str, Any] = {**packed, **{name: arrays[name] for name in _ARRAYS}}
            self.content = IndexContent(self.table, **columns)
        except (KeyError, ValueError, TypeError) as error:
            raise FileFormatError(self.path, f"its parts do not fit together ({quoted(error)}); {FIX}") from error

    def _array(self, name: str) -> np.ndarray:
        path, expected = self.path / f"{name}.npy", self._header["arrays"].get(name)
        size = path.stat().st_size if path.is_file() else None
        if not isinstance(expected, dict) or size is None or size != expected.get("bytes"):
            raise FileFormatError(path, f"missing, truncated or of another index than {HEADER}; {FIX}")
        array = map_array(path, FIX)
        if array.ndim != 1 or array.dtype.kind not in ("f" if name in _REAL else "iu"):
            raise FileFormatError(path, f"an array of shape {array.shape} and type {array.dtype}; {FIX}")
        return array

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, key: str) -> int:
        """The row of a key. Raises UserError, with the nearest key, if the index does not have it."""
        found = self.keys.find(key)
        if found is None:
            near = nearest(key, self.keys[:]) if len(self) <= _NEAREST_AMONG else ""
            what = ONE_OF[self.kind]
            raise UserError(f"{self.path}: no {what} '{key}' in the index; make it again or drop the {what}.{near}")
        return found

    def chains(self, row: int) -> ListedChains:
        """The chains of a row."""
        content, rows = self.content, range(*self.content.first_chains[row : row + 2].tolist())
        names, sequences = (tuple(map(column.__getitem__, rows)) for column in (content.chain_names, content.sequences))
        owners = content.chain_owners[rows.start : rows.stop].tolist()
        return ListedChains(names, sequences, tuple("" if row == NO_OWNER else content.owners[row] for row in owners))

    def sequences_of(self, row: int) -> tuple[str, ...]:
        """The one-letter codes of the row's chains; none if they are unknown."""
        return tuple(filter(None, self.chains(row).sequences))

    def structure(self, row: int) -> str | None:
        """The structure file of the row's entry, relative to the structure folder; None if there is none."""
        return self.content.structures[row] or None

    def has_structure(self) -> Bool[np.ndarray, " n"]:
        """Whether the entry of each row has a structure file."""
        return self.content.structures.lengths() > 0

    def has_alignments(self) -> Bool[np.ndarray, " n"]:
        """Whether every chain of a row, or an identical one, has alignments, or an empty folder of them. A complex that could
        not be read has those of a chain at least."""
        lacking = np.concatenate([[0], np.cumsum(self.content.chain_owners == NO_OWNER)])[self.content.first_chains]
        return np.diff(lacking) == 0

    def are_query_only(self) -> Bool[np.ndarray, " m"]:
        """Whether a chain's sequence is its MSA: its folder is empty, and no identical chain has alignments."""
        is_empty = np.append(self.content.owner_databases == EMPTY_FOLDER, False)  # the last stands for NO_OWNER
        return is_empty[self.content.chain_owners]

    def alignments_of(self, key: str) -> ListedFiles | None:
        """The files that a chain has: its own, or those that its row of an index of chains was lent; None if there are none."""
        content, owner = self.content, self.content.owners.find(key)
        if owner is None and self.kind == CHAINS and (row := self.keys.find(key)) is not None:
            owner = int(content.chain_owners[row])  # a row has one chain
        if owner is None or owner == NO_OWNER:
            return None
        files, database = slice(*content.first_files[owner : owner + 2].tolist()), int(content.owner_databases[owner])
        places = (content.file_name_rows[files], content.file_offsets[files], content.file_lengths[files])
        listed = [
            StoredFile(content.file_names[int(name)], int(offset), int(length))
            for name, offset, length in zip(*places, strict=True)
        ]
        where = "" if database < 0 else content.databases[database]
        return ListedFiles(content.owners[owner], where, listed, database == EMPTY_FOLDER)

    def differs(self, key: str, alignment_dir: Path) -> bool:
        """Whether the folder of a chain of the key has other files, or files of other sizes, than listed; False for files in a
        database. Lists the folders and reads no file."""
        row = self.keys.find(key)
        owners = dict.fromkeys(() if row is None else self.chains(row).owners)
        listings = (listed for owner in owners if (listed := self.alignments_of(owner)) is not None)
        return any(
            files_of_chain(alignment_dir / listed.owner) != {file.name: file.length for file in listed.files}
            for listed in listings
            if not listed.database
        )

    def frequencies(self) -> Float64[np.ndarray, " n"]:
        """The frequency with which `sampling: alphafold2` takes each row, in any unit."""
        content = self.content
        if self.kind == CHAINS:
            return self.table.frequencies()
        return frequencies_of_entries(content.sequences[:], content.chain_clusters, content.first_chains)

    def check_assembly(self, wanted: str | None) -> None:
        """Raise UserError if the index is of another assembly than the run's."""
        if self.assembly != wanted:
            option = "null" if wanted is None else wanted
            raise UserError(
                f"{self.path}: an index of {in_words(self.assembly)}, but data.assembly is {in_words(wanted)}; make the index "
                f"of that with 'evodsp data index --complexes true --assembly {option}', or change data.assembly"
            )

    @property
    def command(self) -> str:
        """The command that makes this index again."""
        unit = "" if self.assembly == "1" else f" --assembly {'null' if self.assembly is None else self.assembly}"
        options = (f"--{source.option} {shlex.quote(source.path)}" for source in self.sources)
        output = shlex.quote(str(self.path))
        return f"evodsp data index{_OPTIONS[self.kind]}{unit} {' '.join(options)} --output {output} --overwrite"

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
                raise FileFormatError(path, f"damaged: its checksum is not the one in {HEADER}; {FIX}")
        for name, fits in self._fitting():
            if not fits:
                raise FileFormatError(self.path, f"its {name} do not fit to its other columns; {FIX}")

    def _fitting(self) -> Iterator[tuple[str, bool]]:
        """Each column, and whether its entries fit the other columns."""
        content = self.content
        chains, owners, files = len(content.chain_names), len(content.owners), len(content.file_name_rows)
        for name in ("keys", *_TEXTS):
            texts: PackedTexts = self.keys if name == "keys" else getattr(content, name)
            yield name, bool((texts.lengths() >= 0).all())
        for name in ("structures", "problems"):
            yield name, len(getattr(content, name)) == len(self)
        for name in ("sequences", "chain_clusters", "chain_owners"):
            yield name, len(getattr(content, name)) == chains
        yield "representatives", within(self.table.representatives, 0, len(self))
        yield "first_chains", fitting_parts(content.first_chains, len(self), chains)
        yield "chain_names", self.kind != CHAINS or bool((np.diff(content.first_chains) == 1).all())
        yield "chain_owners", within(content.chain_owners, NO_OWNER, owners)
        yield "owner_databases", len(content.owner_databases) == owners
        yield "owner_databases", within(content.owner_databases, EMPTY_FOLDER, len(content.databases))
        yield "first_files", fitting_parts(content.first_files, owners, files)
        yield "file_name_rows", within(content.file_name_rows, 0, len(content.file_names))
        for name in ("file_offsets", "file_lengths"):
            column = getattr(content, name)
            yield name, len(column) == files and within(column, 0, np.iinfo(np.int64).max)


_OPTIONS: dict[Kind, str] = {CHAINS: "", COMPLEXES: " --complexes true"}
"""The option of `evodsp data index` that makes each kind, after a blank."""


def fitting_parts(first: np.ndarray, rows: int, parts: int) -> bool:
    """Whether the parts of row i can be those from first[i] to first[i + 1]."""
    fits = len(first) == rows + 1 and first[0] == 0 and first[-1] == parts
    return bool(fits and (np.diff(first) >= 0).all())


def within(numbers: np.ndarray, lowest: int, end: int) -> bool:
    """Whether all numbers are at least `lowest` and below `end`."""
    return not numbers.size or bool(numbers.min() >= lowest and numbers.max() < end)


def write_index(
    path: Path,
    content: IndexContent,
    sources: list[Source],
    obsolete: Mapping[str, str | None],
    kind: Kind = CHAINS,
    assembly: str | None = "1",
) -> None:
    """Write an index, replacing an earlier one in one step. `assembly`: the one of complexes that was read."""
    table = content.table
    keys = table.keys if isinstance(table.keys, PackedTexts) else PackedTexts.of(table.keys)
    columns = {name: getattr(table, name) for name in TABLE_COLUMNS}
    columns |= {name: getattr(content, name) for name in _ARRAYS}
    for name, packed in {"keys": keys, **{name: getattr(content, name) for name in _TEXTS}}.items():
        columns |= {f"{name}.starts": packed.starts, f"{name}.letters": packed.letters}
    with whole_folder(path) as folder:
        written = {}
        for name, array in sorted(columns.items()):
            file = folder / f"{name}.npy"
            np.save(file, array, allow_pickle=False)
            written[name] = {"bytes": file.stat().st_size, "crc32": _checksum(file)}
        header = {
            "format": _FORMAT,
            "version": VERSION,
            "of": kind,
            "assembly": assembly,
            "rows": len(keys),
            "sources": [vars(source) for source in sources],
            "obsolete": dict(sorted(obsolete.items())),
            "arrays": written,
        }
        header = {**header, _OWN: _header_checksum(header)}
        (folder / HEADER).write_text(dumps(header, indent=1) + "\n", encoding="utf-8")


def is_index(path: Path) -> bool:
    """Whether the folder holds an index of any kind and version."""
    return (path / HEADER).is_file()


def _read_header(path: Path) -> dict[str, Any]:
    if not is_index(path):
        what = "there is nothing there" if not path.exists() else f"it has no {HEADER}"
        raise UserError(f"{path}: not an index of a data set, {what}; {FIX}")
    header = read_json(path / HEADER, FIX)
    named = header.get("format") if isinstance(header, dict) else None
    if not str(named).startswith(_FORMAT) or not isinstance(header.get("arrays"), dict):
        raise FileFormatError(path / HEADER, f"not the header of an index; {FIX}")
    if (version := header.get("version")) != VERSION:
        raise FileFormatError(
            path / HEADER, f"version {shown(version)} of the format, but this evodsp reads version {VERSION}; {FIX}"
        )
    if header.get(_OWN) != _header_checksum(header):
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
