"""A feature store: records that were parsed once (`evodsp data build`), read as training needs them.

    <store>/store.json     version, what a record is of, checksums of the indices, obsolete entries
    <store>/chains/        a table of records of single chains
    <store>/complexes/     in its place, one of records of assemblies
    <store>/templates/     a table of structures, of the entries that the hits name; absent without templates

`<store>` is a path, or any address that fsspec knows (`s3://…`, `gs://…`, `https://…`), if its package is installed. Samples
are the same, bit by bit, as those that are made from the files.

Records lie in few large files: tar archives (shards), and one index with the place of each record.

    <table>/00000.tar, 00001.tar, …     member <key>.zst: one record
    <table>/index.npy                   one row a record, sorted by key

Any tool opens the archives. A record is read by one request for a range of bytes, from a local disk or any address that
fsspec knows, and its checksum is compared each time; so any number of processes can read at once. A local index is
memory-mapped: all processes of a machine share it.

LMDB, Parquet and Zarr were tried as well (scripts/benchmarks/results/feature_store.txt).

Of a record the store holds the chains with their MSAs as bytes. A record has each chain of the assembly with its own
coordinates, and the MSAs and hits of each sequence once. Which rows are paired depends on the pairing rule, so a store is of
one rule, as it is of one assembly.

A record is a safetensors file (arrays and a text header, no code) in a zstandard frame. Atoms that do not exist and
positions without deletions are left out, so decoding restores every array bit by bit.

Shapes: N sequences, L residues, A existing atoms, D positions with deletions.
"""

from __future__ import annotations

import io
import json
import tarfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zstandard
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from jaxtyping import Int8, Int32, Integer
from safetensors import SafetensorError
from safetensors.numpy import load, save

from evodsp.data.complexes.pairing import RULES, PairingMsa, PairingRule, say_query_paired
from evodsp.data.index.metadata import ChainFacts, date_of, facts_of_chains
from evodsp.data.records import CHAINS, COMPLEXES, KINDS, ONE_OF, Assembly, Chain, Kind, ProteinSequence, Structure
from evodsp.data.sources.chain_files import Lacking
from evodsp.data.sources.layout import split_key
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed import ChainMsas, Parsed
from evodsp.data.templates.hits import HitLimits, TemplateHit
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.files import whole_file
from evodsp.reading.array_files import array_of, map_array

LEVEL = 9
"""The level of zstandard. On real alignments level 3 is 6 % larger and 19 is 9 % smaller, at a fourth and 30 times the time."""
LARGEST_RECORD = 1 << 33
"""Bytes to which a record may unpack: 8 GiB, more than any public alignment."""

Arrays = dict[str, np.ndarray]
_HEADER = "header"


def encode_record(parsed: Parsed) -> bytes:
    """The bytes of a record; equal records give equal bytes. Each sequence has the MSAs of the first of its chains."""
    arrays: Arrays = {}
    header: dict[str, Any] = {
        "pdb_id": parsed.assembly.pdb_id,
        "key": parsed.assembly.key,
        "names": parsed.assembly.names,
        "chains": [],
        "msas": {},
    }
    for number, chain in enumerate(parsed.assembly.chains):
        of_chain, fields = chain_arrays(chain)
        header["chains"].append(fields)
        arrays |= _named(f"chain{number}", of_chain)
    for number, own in enumerate(parsed.of_each_sequence.values()):
        name = f"sequence{number}"
        of_hits, hits = hit_arrays(parsed.hits.get(own.query.letters, ()))
        arrays |= _named(name, {**row_arrays(own.msa.msa, own.msa.deletions), "profile": own.msa.profile, **of_hits})
        if own.pairing is not None:
            arrays |= _named(f"{name}.pairing", row_arrays(own.pairing.msa, own.pairing.deletions))
        keys = None if own.pairing is None else own.pairing.keys
        header["msas"][own.query.letters] = {"name": name, "keys": keys, "hits": hits}
    return packed(arrays, header)


def decode_record(data: bytes, with_hits: bool) -> Parsed:
    """The record of `encode_record`, without its hits if they are not wanted. Raises ValueError for other bytes."""
    arrays, header = unpacked(data)
    try:
        of_chains = enumerate(header["chains"])
        read = tuple(chain_of(_part(arrays, f"chain{number}"), fields) for number, fields in of_chains)
        assembly = Assembly(header["pdb_id"], tuple(header["names"]), read, header["key"])
        msas, hits = {}, {}
        for letters, fields in header["msas"].items():
            own, keys = _part(arrays, fields["name"]), fields["keys"]
            pairing = None
            if keys is not None:
                pairing = PairingMsa(*rows_of(_part(arrays, f"{fields['name']}.pairing")), tuple(map(str, keys)))
            msas[letters] = MsaFeatures(*rows_of(own), own["profile"]), pairing
            if with_hits:
                hits[letters] = hits_of(own, fields["hits"])
        chains = (
            ChainMsas(ProteinSequence(name, chain.sequence), *msas[chain.sequence])
            for name, chain in zip(assembly.names, assembly.chains, strict=True)
        )
        return Parsed(assembly, tuple(chains), hits)
    except (KeyError, TypeError, IndexError, AttributeError, UserError) as error:
        raise ValueError(f"not a record of chains with their MSAs ({error!r})") from error


def encode_chain(chain: Chain) -> bytes:
    """The bytes of a structure alone; equal chains give equal bytes."""
    return packed(*chain_arrays(chain))


def decode_chain(data: bytes) -> Chain:
    """The chain of `encode_chain`. Raises ValueError for other bytes."""
    arrays, header = unpacked(data)
    try:
        return chain_of(arrays, header)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not the record of a structure ({error!r})") from error


def packed(arrays: Arrays, header: dict[str, Any]) -> bytes:
    """A record of arrays and a header that JSON can hold."""
    text = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
    data = save({name: np.ascontiguousarray(array) for name, array in {**arrays, _HEADER: text}.items()})
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(data)


def unpacked(data: bytes) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and the header of `packed`. Raises ValueError for other bytes."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= LARGEST_RECORD:
            raise ValueError("its size is unknown, or beyond that of any chain")
        arrays = load(zstandard.ZstdDecompressor().decompress(data))
        return arrays, json.loads(arrays[_HEADER].tobytes())
    except (zstandard.ZstdError, SafetensorError, KeyError) as error:
        raise ValueError(f"not a record of a feature store ({error})") from error


def row_arrays(msa: Int8[np.ndarray, "N L"], deletions: Integer[np.ndarray, "N L"]) -> Arrays:
    """Rows of an MSA as arrays."""
    at = np.flatnonzero(deletions)  # [D]
    return {
        "msa": msa.view(np.uint8),
        "deletion_steps": _narrow(np.diff(at, prepend=0)),
        "deletion_counts": _narrow(deletions.ravel()[at]),
    }


def rows_of(arrays: Arrays) -> tuple[Int8[np.ndarray, "N L"], Integer[np.ndarray, "N L"]]:
    """The letters and deletions of `row_arrays`."""
    msa = arrays["msa"].view(np.int8)
    deletions = np.zeros(msa.size, arrays["deletion_counts"].dtype)
    deletions[np.cumsum(arrays["deletion_steps"], dtype=np.int64)] = arrays["deletion_counts"]
    return msa, deletions.reshape(msa.shape)


def chain_arrays(chain: Chain) -> tuple[Arrays, dict[str, Any]]:
    """A structure as arrays and a header. Raises ValueError for a mask or positions that they would not restore."""
    exists = chain.mask != 0
    if not np.array_equal(exists, chain.mask) or chain.positions[~exists].any():
        raise ValueError(
            f"chain {chain.key}: its mask is not of 0 and 1, or an atom that does not exist has a position"
        )
    header = {
        "pdb_id": chain.pdb_id,
        "chain_id": chain.chain_id,
        "sequence": chain.sequence,
        "insertion_codes": {str(i): code for i, code in enumerate(chain.insertion_code) if code},
        "resolution": chain.resolution,
        "method": chain.method,
        "alternatives": chain.alternatives,
        "released": None if chain.release_date is None else chain.release_date.isoformat(),
    }
    arrays = {
        "atom_exists": np.packbits(exists),
        "atom_positions": chain.positions[exists],  # [A, 3]
        "residue_number": chain.residue_number,
        "is_missing": np.packbits(chain.is_missing),
    }
    return arrays, header


def chain_of(arrays: Arrays, header: dict[str, Any]) -> Chain:
    """The chain of `chain_arrays`."""
    sequence, codes, released = header["sequence"], header["insertion_codes"], header["released"]
    length = len(sequence)
    exists = np.unpackbits(arrays["atom_exists"], count=length * 37).view(bool).reshape(length, 37)
    positions = np.zeros((length, 37, 3), np.float32)
    positions[exists] = arrays["atom_positions"]
    return Chain(
        pdb_id=header["pdb_id"],
        chain_id=header["chain_id"],
        sequence=sequence,
        residue_number=arrays["residue_number"],
        insertion_code=tuple(codes.get(str(i), "") for i in range(length)),
        is_missing=np.unpackbits(arrays["is_missing"], count=length).view(bool),
        positions=positions,
        mask=exists.astype(np.float32),
        resolution=header["resolution"],
        method=header["method"],
        release_date=None if released is None else date.fromisoformat(released),
        alternatives=tuple((int(index), str(letters)) for index, letters in header["alternatives"]),
    )


_HIT_FIELDS = (
    "index", "name", "pdb_id", "chain_id", "aligned_columns", "sum_probs", "query", "hit_sequence",
)  # fmt: skip


def hit_arrays(hits: Sequence[TemplateHit]) -> tuple[Arrays, list[list[Any]]]:
    """Template hits as arrays and a header."""
    arrays = {
        "hit_query_indices": _joined([hit.indices_query for hit in hits]),
        "hit_template_indices": _joined([hit.indices_hit for hit in hits]),
    }
    return arrays, [
        [*(getattr(hit, name) for name in _HIT_FIELDS), len(hit.indices_query), len(hit.indices_hit)] for hit in hits
    ]


def hits_of(arrays: Arrays, fields: list[list[Any]]) -> tuple[TemplateHit, ...]:
    """The hits of `hit_arrays`."""
    of_query = np.split(arrays["hit_query_indices"], np.cumsum([entry[-2] for entry in fields], dtype=np.int64))
    of_hit = np.split(arrays["hit_template_indices"], np.cumsum([entry[-1] for entry in fields], dtype=np.int64))
    return tuple(
        TemplateHit(**dict(zip(_HIT_FIELDS, entry[:-2], strict=True)), indices_query=query, indices_hit=hit)
        for entry, query, hit in zip(fields, of_query[:-1], of_hit[:-1], strict=True)
    )


def _joined(indices: Sequence[np.ndarray]) -> Int32[np.ndarray, " C"]:
    return np.concatenate([np.zeros(0, np.int32), *indices])


def _narrow(values: np.ndarray) -> np.ndarray:
    """Non-negative integers in the smallest unsigned type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _named(part: str, arrays: Arrays) -> Arrays:
    """The arrays of a part of a record, under names of their own."""
    return {f"{part}/{name}": values for name, values in arrays.items()}


def _part(arrays: Arrays, part: str) -> Arrays:
    """The arrays that `_named` gave names."""
    return {name.removeprefix(f"{part}/"): values for name, values in arrays.items() if name.startswith(f"{part}/")}


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


FORMAT_VERSION = 2
DESCRIPTION = "store.json"
TEMPLATES = "templates"
_BUILT_WITH: dict[Kind, str] = {CHAINS: "without --complexes", COMPLEXES: "with --complexes true"}
_MOST_COMPARED = 10_000
"""The nearest name of a misspelt chain is looked for among at most this many."""

R = TypeVar("R")


class FeatureStore:
    """A feature store opened for reading. Pickling transfers its address, and opens it there.

    `kind`: what its records have to be of. `warn`: is told of chains without rows for pairing, and what such rows are.
    Raises UserError if there is none, if another version of evodsp made it, if its records are of another kind, or if its
    indices are damaged.
    """

    unknown: Lacking = "record"
    index = structure_dir = None
    """A store is its own index, and has the structures in its records."""

    def __init__(self, address: str, kind: Kind = CHAINS, warn: Callable[[str, str], None] = say_query_paired) -> None:
        self.address, self.kind, self._warn = address, kind, warn
        try:
            system, folder = url_to_fs(address)
            description = json.loads(system.cat_file(f"{folder}/{DESCRIPTION}"))
        except ImportError as error:
            # fsspec's words name a package, but no command; its cause is the import that failed.
            package = getattr(error.__cause__, "name", None) or error.name
            fix = f"; run: pip install {package}" if package else ""
            raise UserError(f"{address}: {' '.join(str(error).split())}{fix}") from error
        except OSError as error:
            raise UserError(
                f"{address}: no feature store there ({DESCRIPTION}: {getattr(error, 'strerror', None) or error}); check the "
                "address, or make the store with 'evodsp data build'"
            ) from error
        except (ValueError, RecursionError) as error:
            message = "not the description of a feature store; check the address, or copy the store again"
            raise FileFormatError(f"{address}/{DESCRIPTION}", message) from error
        if (version := entry_of(address, description, "format_version", int)) != FORMAT_VERSION:
            fix = "use a newer evodsp" if version > FORMAT_VERSION else "build the store again with 'evodsp data build'"
            raise UserError(f"{address}: has format version {version}, this evodsp reads {FORMAT_VERSION}; {fix}")
        tables = entry_of(address, description, "tables", dict)
        for other in KINDS:
            if other in tables and other != self.kind:
                raise UserError(
                    f"{address}: a feature store of {other}, but samples are made of {self.kind} here; give another store, or "
                    f"build one {_BUILT_WITH[self.kind]}"
                )
        self.obsolete: dict[str, str | None] = entry_of(address, description, "obsolete", dict)
        """Withdrawn entries among the templates, with their successors."""
        self.plan: dict[str, Any] = entry_of(address, description, "plan", dict)
        """Sources of the store."""
        self._records = Table(system, f"{folder}/{self.kind}", entry_of(address, tables, self.kind, str))
        self.structures = None
        """The templates' structures; None if the store was built without them."""
        if TEMPLATES in tables:
            self.structures = StoredStructures(
                address, Table(system, f"{folder}/{TEMPLATES}", entry_of(address, tables, TEMPLATES, str)), self.kind
            )
        self.rule: PairingRule | None = None
        """The rule by which rows of different chains are paired; None for single chains."""
        if kind == COMPLEXES:
            self.rule = RULES.get(named := entry_of(address, self.plan, "pairing", str))
            if self.rule is None:
                message = f"rows are paired by '{named}', not by {' or '.join(RULES)}; use a newer evodsp"
                raise FileFormatError(f"{address}/{DESCRIPTION}", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self.kind, self._warn)

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.address}')"

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object, /) -> bool:
        return key in self._records

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return self._records.keys()

    def parsed(self, key: str, with_hits: bool = False) -> Parsed:
        """The record, with the hits of template searches if they are wanted. Raises UserError, with the nearest key, if the
        store does not have it or if it is damaged. Warns of chains without rows for pairing, as files do."""
        parsed = self._decoded(key, lambda data: decode_record(data, with_hits))
        for own in parsed.chains:
            if self.rule is not None and own.pairing is None:
                self._warn(f"{self.address}: {key} chain {own.query.name}", self.rule.names)
        return parsed

    def assembly_of(self, key: str) -> Assembly:
        """The chains of the record. Raises UserError as `parsed` does."""
        return self._decoded(key, lambda data: decode_record(data, with_hits=False)).assembly

    def chain(self, key: str) -> Chain:
        """The first chain of the record. Raises UserError as `parsed` does."""
        return self.assembly_of(key).chains[0]

    def sequences_of(self, key: str) -> tuple[str, ...]:
        return tuple(chain.sequence for chain in self.assembly_of(key).chains)

    def facts(self, key: str) -> ChainFacts:
        return facts_of_chains(self.assembly_of(key).chains)

    @property
    def min_plddt(self) -> float | None:
        """The pLDDT below which atoms of predicted structures are masked; None for experiments."""
        return self.plan.get("min_plddt")

    @property
    def assembly(self) -> str | None:
        """The biological assembly of complexes; None: the asymmetric unit."""
        return self.plan.get("assembly")

    def _decoded(self, key: str, decode: Callable[[bytes], R]) -> R:
        """The record of a key. Raises UserError, with the nearest key, if there is none, or if it is damaged."""
        data = self._records.read(key)
        if data is None:
            names = self.keys() if len(self) <= _MOST_COMPARED else []
            raise UserError(
                f"{self.address}: no {ONE_OF[self.kind]} '{key}' in the feature store; leave it out or build the store with it."
                f"{nearest(key, names)}"
            )
        return decoded(self.address, key, decode, data)

    def stale_sources(self) -> list[str]:
        """None: a store is checked against its checksums when it is opened."""
        return []

    def name_of(self, key: str) -> str:
        return key  # as it was built

    def structure_lookup(self) -> Callable[[str], bool]:
        return frozenset(self.keys()).__contains__  # every record has a structure

    def absence(self, key: str, lacking: Lacking) -> str:
        fix = "leave it out or build the store with it"
        return f"no {ONE_OF[self.kind]} '{key}' in {self.address}; {fix}.{nearest(key, self.keys())}"

    def template_source(self, max_date: date | None = None) -> TemplateSource | None:
        """The source of templates; None if the store was built without them. `max_date`: latest release date."""
        if self.structures is None:
            return None
        return TemplateSource(self.structures, HitLimits(max_date=max_date), self.obsolete)


class StoredStructures:
    """Template structures of a feature store. Pickling transfers only its address."""

    def __init__(self, address: str, table: Table, kind: Kind) -> None:
        self._address, self._table, self._kind = address, table, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened_structures, (self._address, self._kind)

    def has_structure(self, key: str) -> bool:
        """Whether the store has the chain's entry (whether the entry has the chain is not checked)."""
        return bool(self._table.chains_of(key.rpartition("_")[0]))

    def chain(self, key: str) -> Chain:
        """The chain. Raises UserError if its entry does not have it, or is not in the store."""
        data = self._table.read(key)
        if data is None:
            raise UserError(
                f"{self._address}: no chain '{key}' among the templates of the feature store; build it again"
            )
        return decoded(self._address, key, decode_chain, data)

    def structure(self, pdb_id: str) -> Structure:
        """All protein chains of the entry. Raises UserError if it is not in the store."""
        chains = [self.chain(key) for key in self._table.chains_of(pdb_id)]
        if not chains:
            raise UserError(
                f"{self._address}: no entry '{pdb_id}' among the templates of the feature store; build it again"
            )
        first = chains[0]
        by_id = {chain.chain_id: chain for chain in chains}
        return Structure(first.pdb_id, first.method, first.resolution, first.release_date, by_id)

    def release_date(self, pdb_id: str) -> date | None:
        """The release date of the entry, None if it is not known."""
        return next((self._table.released(key) for key in self._table.chains_of(pdb_id)), None)


def _reopened_structures(address: str, kind: Kind) -> StoredStructures:
    structures = FeatureStore(address, kind).structures
    assert structures is not None  # the store had them when this was pickled
    return structures


def decoded(address: str, key: str, decode: Callable[[bytes], R], data: bytes) -> R:
    """The record `data` of a key. Raises FileFormatError where `decode` raises ValueError."""
    try:
        return decode(data)
    except ValueError as error:
        raise FileFormatError(address, f"the record of '{key}' is {error}; build the store again") from error


def entry_of(address: str, description: Any, name: str, kind: type) -> Any:
    value = description.get(name) if isinstance(description, dict) else None
    if not isinstance(value, kind):
        message = f"'{name}' is missing or has another type; copy the feature store again"
        raise FileFormatError(f"{address}/{DESCRIPTION}", message)
    return value
