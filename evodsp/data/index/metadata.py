"""The facts about each chain that are known without reading its files: the columns that filters, weights and reports
need, and the tables that they come from: OpenFold's caches, clusters, lists of identical chains.

- `chain_data_cache.json`: `{chain: {"release_date", "seq", "resolution", "cluster_size"}}`
- `mmcif_cache.json`: `{entry: {"release_date", "chain_ids", "seqs", "resolution"}}`
- clusters of chains, or of entities as the PDB lists them (`1ABC_1` is the first polymer of 1ABC), and OpenProteinSet's
  `duplicate_pdb_chains.txt`: names separated by blanks, a line for each set

The index of a data set (`evodsp data index`) stores such a table and opens it as memory maps, so that the workers and ranks
of a machine share one copy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64, UInt8

from evodsp.data.formats.mmcif import Header, read_header
from evodsp.data.records import Chain
from evodsp.data.sources.layout import chain_id_in, split_key
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import LETTERS_WITH_X, UNKNOWN, encode_sequence
from evodsp.reading.text_files import lines_of, read_json

_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # file names may be any bytes


class PackedTexts(Sequence[str]):
    """n texts. `starts`: the position at which each begins, and the end of the last. `letters`: their UTF-8 bytes, one text
    after another."""

    def __init__(self, starts: Int64[np.ndarray, " n_plus_1"], letters: UInt8[np.ndarray, " m"]) -> None:
        if not len(starts) or starts[0] != 0 or starts[-1] != len(letters):
            raise ValueError(f"texts that do not end with their {len(letters)} letters")
        self.starts, self.letters = starts, letters

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedTexts:
        encoded = [text.encode(_ENCODING, _ERRORS) for text in texts]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=starts[1:])
        return cls(starts, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            # Plain integers and bytes: slicing arrays would take ten times as long.
            starts, letters = self.starts.tolist(), self.letters.tobytes()
            rows = range(len(self))[index]
            return [letters[starts[row] : starts[row + 1]].decode(_ENCODING, _ERRORS) for row in rows]
        row = range(len(self))[index]
        return self._bytes(row).decode(_ENCODING, _ERRORS)

    def find(self, text: str) -> int | None:
        """The row of `text`, None if it is not there. The texts must be sorted. O(log n) comparisons."""
        # Bytes of UTF-8 sort as the letters do.
        wanted = text.encode(_ENCODING, _ERRORS)
        row = bisect_left(range(len(self)), wanted, key=self._bytes)
        return row if row < len(self) and self._bytes(row) == wanted else None

    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Bytes of each text."""
        return np.diff(self.starts)

    def _bytes(self, row: int) -> bytes:
        return self.letters[self.starts[row] : self.starts[row + 1]].tobytes()


UNKNOWN_DAY = np.iinfo(np.int32).min
"""Release day of a chain whose entry has no date."""
_EPOCH = date(1970, 1, 1).toordinal()
UNKNOWN_CLUSTER = -1
"""Cluster size of a chain that the cluster file does not list; OpenFold writes the same number."""

SHORT, LONG = 256, 512
"""Residues: shorter chains are taken as often as one of `SHORT`, longer ones as one of `LONG`."""


def day_of(released: date | None) -> int:
    """Days since 1970-01-01; `UNKNOWN_DAY` for None."""
    return UNKNOWN_DAY if released is None else released.toordinal() - _EPOCH


def date_of(day: int) -> date | None:
    """The inverse of `day_of`."""
    return None if day == UNKNOWN_DAY else date.fromordinal(day + _EPOCH)


@dataclass(frozen=True)
class ChainTable:
    """n chains, in the order of their keys. Each column has one entry per chain."""

    keys: Sequence[str]
    """`<entry>_<chain>`, sorted, distinct."""
    lengths: Int32[np.ndarray, " n"]
    """Residues of the whole chain (SEQRES); 0 if unknown."""
    resolutions: Float32[np.ndarray, " n"]
    """Resolutions in Å; 0 if the method has none (NMR), as in AlphaFold2's and OpenFold's caches; NaN if unknown."""
    release_days: Int32[np.ndarray, " n"]
    """Days since 1970-01-01; `UNKNOWN_DAY` if unknown."""
    cluster_sizes: Int32[np.ndarray, " n"]
    """Chains in the chain's sequence cluster, itself included; `UNKNOWN_CLUSTER` if unknown."""
    largest_fractions: Float32[np.ndarray, " n"]
    """Share of the commonest residue type in the sequence, X counted as a type of its own; NaN if the sequence is unknown."""
    unknown_fractions: Float32[np.ndarray, " n"]
    """Share of X in the sequence; NaN if the sequence is unknown."""
    representatives: Int32[np.ndarray, " n"]
    """Row of the chain whose alignments this chain uses: its own row, or that of an identical chain."""

    def __post_init__(self) -> None:
        for column in fields(self)[1:]:
            if (entries := len(getattr(self, column.name))) != len(self.keys):
                raise ValueError(f"{column.name} has {entries} entries for {len(self.keys)} chains")

    def __len__(self) -> int:
        return len(self.keys)

    def rows_of(self, keys: Iterable[str], name_of: Callable[[str], str]) -> list[int | None]:
        """The row of each of `keys`; None for one without. `name_of`: gives the name that the store has a key by (`Store`). Its
        row is that of a key without a row of its own."""
        row_of = dict(zip(self.keys[:], range(len(self)), strict=True))
        # `name_of` reads the structure, so it is asked only where the entry has a row that the key may have.
        return [
            row_of.get(name_of(key) if key not in row_of and key.rpartition("_")[0] in row_of else key) for key in keys
        ]

    def frequencies(self) -> Float64[np.ndarray, " n"]:
        """The frequency with which AlphaFold2 takes each chain: clamp(length, 256, 512) / 512, divided by the size of its
        sequence cluster.

        A chain whose cluster is unknown has that of its representative; if that is unknown too, the chains of one
        representative, which are identical, are a cluster. A chain of unknown length counts as short.
        """
        sizes = self.cluster_sizes.astype(np.float64)
        of_representative = sizes[self.representatives]
        identical = np.bincount(self.representatives, minlength=len(self))[self.representatives]
        sizes = np.where(sizes > 0, sizes, np.where(of_representative > 0, of_representative, identical))
        return np.clip(self.lengths, SHORT, LONG) / LONG / sizes


_FIX = "make the cache again, or leave it out"
_LARGEST_CLUSTER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ChainFacts:
    """Facts about a chain. `resolution` is in Å: 0 if the method has none (NMR), NaN if unknown; `sequence`: '' if
    unknown."""

    sequence: str = ""
    resolution: float = math.nan
    release_day: int = UNKNOWN_DAY
    cluster_size: int = UNKNOWN_CLUSTER


def facts_of_file(path: Path, key: str) -> tuple[ChainFacts, str]:
    """Facts about a chain in the header of a structure file; and its entity, such as 1abc_1 ('' if the file numbers none).

    Raises UserError if the file does not have the chain, and as `read_header` does.
    """
    header, entry, chain_id = _header(path), split_key(key)[0], chain_id_in(path, key)
    if not chain_id and len(header.sequences) == 1:
        (chain_id,) = header.sequences
    if chain_id not in header.sequences:
        raise UserError(
            f"{path}: no protein chain '{chain_id}'. Chains: {', '.join(sorted(header.sequences))}; drop the chain"
        )
    facts = ChainFacts(header.sequences[chain_id], header.resolution or 0.0, day_of(header.release_date))
    number = header.entities.get(chain_id)
    return facts, "" if number is None else f"{entry}_{number}"


@lru_cache(maxsize=4)
def _header(path: Path) -> Header:
    """The header of a file. It is kept for the next chains: they are sorted, so those of an entry follow each other."""
    return read_header(path)


def facts_of_chains(chains: Sequence[Chain]) -> ChainFacts:
    """The facts about the chains of an entry that were read, or about one: their sequences are joined."""
    first = chains[0]
    letters = "".join(chain.sequence for chain in chains)
    return ChainFacts(letters, first.resolution or 0.0, day_of(first.release_date))


def read_chain_cache(path: Path) -> dict[str, ChainFacts]:
    """`chain_data_cache.json` by chain key. Raises FileFormatError for an entry of another format."""
    return {
        key: ChainFacts(
            _sequence(path, key, entry.get("seq")),
            _resolution(path, key, entry.get("resolution")),
            _day(path, key, entry.get("release_date")),
            _cluster(path, key, entry.get("cluster_size")),
        )
        for key, entry in _entries(path).items()
    }


def cached_table(path: str | Path) -> ChainTable:
    """The chains of `chain_data_cache.json`, for data sets without an index. Each chain is its own representative.

    Raises FileFormatError for an entry of another format, or if there is none.
    """
    facts = read_chain_cache(Path(path))
    if not facts:
        raise FileFormatError(path, f"no chain in this chain_data_cache; {_FIX}")
    keys = sorted(facts)
    return table_of(keys, [facts[key] for key in keys])


def cached_entries(path: str | Path) -> tuple[ChainTable, Float64[np.ndarray, " n"]]:
    """The entries of `chain_data_cache.json`, each with all of its chains, and how often they are drawn
    (`frequencies_of_entries`).

    An entry has the length and the residues of all chains, the smallest cluster, and the other facts of its first chain.
    Raises FileFormatError for an entry of another format, or if there is none.
    """
    cached_table(path)
    chains = read_chain_cache(Path(path))
    of_entry: dict[str, list[ChainFacts]] = {}
    for key in sorted(chains):
        of_entry.setdefault(split_key(key)[0], []).append(chains[key])
    keys = sorted(of_entry)
    facts = [
        replace(
            of_entry[key][0],
            sequence="".join(one.sequence for one in of_entry[key]),
            cluster_size=smallest_cluster(one.cluster_size for one in of_entry[key]),
        )
        for key in keys
    ]
    all_chains = [one for key in keys for one in of_entry[key]]
    first = np.cumsum([0, *(len(of_entry[key]) for key in keys)])
    sizes = np.array([one.cluster_size for one in all_chains], np.int64)
    return table_of(keys, facts), frequencies_of_entries([one.sequence for one in all_chains], sizes, first)


def smallest_cluster(sizes: Iterable[int]) -> int:
    """The smallest of some clusters; UNKNOWN_CLUSTER if none is known."""
    return min((size for size in sizes if size != UNKNOWN_CLUSTER), default=UNKNOWN_CLUSTER)


def frequencies_of_entries(
    letters: Sequence[str], sizes: Int64[np.ndarray, " m"], first: Int64[np.ndarray, " n_plus_1"]
) -> Float64[np.ndarray, " n"]:
    """Sampling weights of entries, in any unit, given the sequence and the cluster of each of their chains. `first`: the chains
    of entry i are those from first[i] to first[i + 1].

    AlphaFold-Multimer draws chains, each as often as 1 / the size of its cluster, and takes the whole entry: the frequency of
    an entry is the sum over its chains. Where no cluster is known, the chains of one sequence are a cluster.
    """
    alike = Counter(letters)
    known = np.where(sizes > 0, sizes, [alike[one] for one in letters]).astype(np.float64)
    return np.diff(np.concatenate([[0.0], np.cumsum(1 / known)])[first])


def table_of(keys: Sequence[str], facts: Sequence[ChainFacts]) -> ChainTable:
    """A table of chains whose representatives are themselves. `keys`: sorted."""
    sequences = [fact.sequence for fact in facts]
    fractions = np.array([_residue_fractions(sequence) for sequence in sequences], np.float32).reshape(-1, 2)
    return ChainTable(
        keys=keys,
        lengths=np.array([len(sequence) for sequence in sequences], np.int32),
        resolutions=np.array([fact.resolution for fact in facts], np.float32),
        release_days=np.array([fact.release_day for fact in facts], np.int32),
        cluster_sizes=np.array([fact.cluster_size for fact in facts], np.int32),
        largest_fractions=np.ascontiguousarray(fractions[:, 0]),
        unknown_fractions=np.ascontiguousarray(fractions[:, 1]),
        representatives=np.arange(len(keys), dtype=np.int32),
    )


def _residue_fractions(sequence: str) -> Float32[np.ndarray, " 2"]:
    """Share of the commonest residue type, X counted as one, and share of X; NaN for an empty sequence."""
    if not sequence:
        return np.full(2, np.nan, np.float32)
    counts = np.bincount(encode_sequence(sequence), minlength=LETTERS_WITH_X)
    return np.array([counts.max(), counts[UNKNOWN]], np.float32) / np.float32(len(sequence))


def read_entry_cache(path: Path) -> dict[str, ChainFacts]:
    """`mmcif_cache.json` by chain key. Raises FileFormatError for an entry of another format."""
    found: dict[str, ChainFacts] = {}
    for key, entry in _entries(path).items():
        names, sequences = entry.get("chain_ids", []), entry.get("seqs", [])
        if not isinstance(names, list) or not isinstance(sequences, list) or len(names) != len(sequences):
            raise FileFormatError(path, f"chain_ids and seqs of '{key}' must be lists of equal length; {_FIX}")
        resolution, day = _resolution(path, key, entry.get("resolution")), _day(path, key, entry.get("release_date"))
        for name, sequence in zip(names, sequences, strict=True):
            found[f"{key}_{name}"] = ChainFacts(_sequence(path, key, sequence), resolution, day)
    return found


def read_sets(path: Path) -> list[list[str]]:
    """The sets of a file of clusters or of identical chains. Raises FileFormatError if there is none."""
    sets = [names for line in lines_of(path) if (names := line.partition("#")[0].split())]
    if not sets:
        raise FileFormatError(path, "no chain names in it; give a file with the chains of a set in each line")
    return sets


class ClusterSizes:
    """Sizes of clusters by chain. The entry may be in either case; so may the chain id, unless two chains differ in it only.

    Cluster files of the PDB are upper case, chain folders are not; OpenFold compares all in upper case.
    """

    def __init__(self, clusters: list[list[str]]) -> None:
        self._exact = {_folded_entry(name): len(names) for names in clusters for name in names}
        self._folded = {name.upper(): len(names) for names in clusters for name in names}

    def of(self, key: str) -> int:
        """Chains of the cluster of `key`; UNKNOWN_CLUSTER if no cluster has it."""
        return self._exact.get(_folded_entry(key), self._folded.get(key.upper(), UNKNOWN_CLUSTER))


class EntityClusters:
    """Clusters of entities, as in the PDB's `clusters-by-entity-40.txt`. Names of entries may be in either case."""

    def __init__(self, clusters: list[list[str]]) -> None:
        self._cluster_of = {name.upper(): number for number, names in enumerate(clusters) for name in names}

    def sizes(self, entities: Iterable[str]) -> list[int]:
        """For the entity of each chain of a data set (`1abc_1`), the number of these chains that are in its cluster;
        UNKNOWN_CLUSTER if no cluster has it.

        Chains are counted, not entities, because chains are drawn: sixty copies of a chain are one entity.
        """
        clusters = [self._cluster_of.get(entity.upper()) for entity in entities]
        chains = Counter(clusters)
        return [UNKNOWN_CLUSTER if cluster is None else chains[cluster] for cluster in clusters]


def are_entities(clusters: list[list[str]]) -> bool:
    """Whether a cluster file names entities: behind the last underscore of each name is a number. Chains that all have numbers
    for names do not occur beyond single entries."""
    return all(name.rpartition("_")[2].isdecimal() for names in clusters for name in names)


def _folded_entry(name: str) -> str:
    entry, separator, chain = name.rpartition("_")
    return f"{entry.lower()}{separator}{chain}"


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    cache = read_json(path, _FIX)
    if not isinstance(cache, dict):
        raise FileFormatError(path, f'expected {{name: {{"release_date": …}}}}; {_FIX}')
    for key, entry in cache.items():
        if not isinstance(entry, dict):
            raise FileFormatError(
                path, f"expected {{name: {{\"release_date\": …}}}}, '{key}' is {_short(entry)}; {_FIX}"
            )
        try:
            split_key(key)
        except UserError as error:
            raise FileFormatError(path, f"{error}; {_FIX}") from error
    return cache


def _sequence(path: Path, key: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not (value == "" or (value.isascii() and value.isalpha())):
        raise FileFormatError(path, f"the sequence of '{key}' is {_short(value)}, not letters; {_FIX}")
    return value.upper()


def _resolution(path: Path, key: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise FileFormatError(path, f"the resolution of '{key}' is {_short(value)}, not a number of Å; {_FIX}")
    return float(value)


def _day(path: Path, key: str, value: Any) -> int:
    if value is None:
        return UNKNOWN_DAY
    try:
        return day_of(date.fromisoformat(str(value)[:10]))
    except ValueError as error:
        message = f"the release_date of '{key}' is {_short(value)}, not a date such as 2020-05-14; {_FIX}"
        raise FileFormatError(path, message) from error


def _cluster(path: Path, key: str, value: Any) -> int:
    if value is None or value == UNKNOWN_CLUSTER:
        return UNKNOWN_CLUSTER
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_CLUSTER:
        raise FileFormatError(path, f"the cluster_size of '{key}' is {_short(value)}, not a number of chains; {_FIX}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
