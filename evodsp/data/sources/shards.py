"""A table of records in few large files: tar archives (shards), and one index with the place of each record.

    <table>/00000.tar, 00001.tar, …     member <key>.zst: one record
    <table>/index.npy                   one row a record, sorted by key

Any tool opens the archives. A record is read by one request for a range of bytes, from a local disk or any address that fsspec
knows, and its checksum is compared each time; so any number of processes can read at once. A local index is memory-mapped:
all processes of a machine share it.

LMDB, Parquet and Zarr were tried as well (scripts/benchmarks/results/feature_store.txt).
"""

from __future__ import annotations

import io
import tarfile
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from evodsp.data.index.chain_table import date_of
from evodsp.data.sources.layout import split_key
from evodsp.errors import FileFormatError, UserError
from evodsp.files import whole_file
from evodsp.reading.array_files import array_of, map_array

LONGEST_KEY = 100
"""Most bytes of a chain key: the name of a tar member holds no more."""
INDEX = "index.npy"
_FIX = "copy the feature store again"


@dataclass(frozen=True)
class ShardEntry:
    """A record in a shard. `released`: the chain's release day since 1970-01-01, or `UNKNOWN_DAY`."""

    key: str
    offset: int
    size: int
    digest: str
    length: int
    released: int


def digest_of(data: bytes) -> str:
    """The checksum of a record or an index: 128 bits of BLAKE2b, in hexadecimal."""
    return blake2b(data, digest_size=16).hexdigest()


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"{number:05}.tar"


def write_shard(path: Path, records: Iterable[tuple[str, bytes, int, int]]) -> list[ShardEntry]:
    """Write the records (key, bytes, residues, release day) to a tar archive. Equal records give equal archives."""
    entries = []
    with whole_file(path) as partial, tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, data, length, released in records:
            member = tarfile.TarInfo(f"{key}.zst")
            member.size = len(data)
            offset = archive.offset + tarfile.BLOCKSIZE  # behind the member's header
            archive.addfile(member, io.BytesIO(data))
            entries.append(ShardEntry(key, offset, len(data), digest_of(data), length, released))
    return entries


def write_index(path: Path, shards: Sequence[Sequence[ShardEntry]]) -> str:
    """Write the index of all shards, in the order of their numbers. Returns the index's checksum."""
    rows = sorted((entry.key.encode(), number, entry) for number, shard in enumerate(shards) for entry in shard)
    longest = max((len(key) for key, _, _ in rows), default=1)
    table = np.zeros(len(rows), _index_type(longest))
    for name in ("offset", "size", "length", "released"):
        table[name] = [getattr(entry, name) for _, _, entry in rows]
    table["key"], table["shard"] = [key for key, _, _ in rows], [number for _, number, _ in rows]
    table["digest"] = [np.void(bytes.fromhex(entry.digest)) for _, _, entry in rows]
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, table)
    return digest_of(path.read_bytes())


class Table:
    """The records of a folder of shards, by key."""

    def __init__(self, system: Any, folder: str, index_digest: str) -> None:
        """`system`: an fsspec file system; `folder`: its path there. Raises UserError for a missing or damaged index."""
        self._system, self._folder = system, folder
        self._index = self._read_index(index_digest)
        self._keys = self._index["key"]

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object, /) -> bool:
        return isinstance(key, str) and self._row(key) is not None

    def keys(self) -> list[str]:
        """All keys, sorted by their bytes."""
        return [key.decode() for key in self._keys.tolist()]

    def read(self, key: str) -> bytes | None:
        """The record of a key; None if there is none. Raises UserError if it cannot be read or has another checksum."""
        row = self._row(key)
        if row is None:
            return None
        entry = self._index[row]
        path, start = f"{self._folder}/{shard_name(int(entry['shard']))}", int(entry["offset"])
        try:
            data = self._system.cat_file(path, start=start, end=start + int(entry["size"]))
        except OSError as error:
            message = f"{path}: cannot be read ({error.strerror or error}); copy the feature store again"
            raise UserError(message) from error
        if digest_of(data) != entry["digest"].tobytes().hex():
            raise FileFormatError(
                path, f"the record of '{key}' is damaged (its checksum differs); copy the store again"
            )
        return bytes(data)

    def chains_of(self, pdb_id: str) -> list[str]:
        """The keys of an entry's chains, in the order in which they were written."""
        found, row, prefix = [], bisect_left(self._keys, f"{pdb_id}_".encode()), f"{pdb_id}_"
        while row < len(self) and (key := self._keys[row].decode()).startswith(prefix):
            if split_key(key)[0] == pdb_id:
                found.append((int(self._index["shard"][row]), int(self._index["offset"][row]), key))
            row += 1
        return [key for _, _, key in sorted(found)]

    def released(self, key: str) -> date | None:
        """The release date of a chain in the table; None if it is unknown."""
        row = self._row(key)
        return None if row is None else date_of(int(self._index["released"][row]))

    def _row(self, key: str) -> int | None:
        encoded = key.encode()
        row = bisect_left(self._keys, encoded)
        return row if row < len(self) and self._keys[row] == encoded else None

    def _read_index(self, digest: str) -> np.ndarray:
        path, is_local = f"{self._folder}/{INDEX}", isinstance(self._system, LocalFileSystem)
        try:
            data = Path(path).read_bytes() if is_local else self._system.cat_file(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); {_FIX}") from error
        if digest_of(data) != digest:
            raise FileFormatError(path, f"the index is damaged (its checksum differs); {_FIX}")
        index = map_array(path, _FIX) if is_local else array_of(data, path, _FIX)
        names = _index_type(1).names
        if index.ndim != 1 or index.dtype.names != names or index.dtype != _index_type(index.dtype["key"].itemsize):
            raise FileFormatError(path, f"not the index of a feature store; {_FIX}")
        return index


def _index_type(longest_key: int) -> np.dtype[Any]:
    return np.dtype(
        [
            *(("key", f"S{longest_key}"), ("digest", "V16"), ("offset", "<u8"), ("size", "<u8")),
            *(("shard", "<u4"), ("length", "<u4"), ("released", "<i4")),
        ]
    )
