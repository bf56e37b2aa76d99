"""Compare formats for a feature store, on your own chains: size, and time to read one record at random.

    python -m scripts.benchmarks.feature_store --data DIR [--data DIR] --output FILE [--copies 50] [--reads 400]

Each DIR has `alignments/` and `mmcif_files/`. Every chain that can be read becomes a record (`evodsp.data.record_codec`), which
is stored `--copies` times under different keys: in evodsp's shards, LMDB and Parquet as the same bytes, in Zarr as its arrays.
Then records are read in random order by one thread, all formats in turn, so that other load on the machine affects all of
them; the files are in the page cache. LMDB, pyarrow and Zarr take part where they are installed. Last, an index of 634,434
chains is written and opened.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from evodsp.data.parsed_chain import ParsedChain
from evodsp.data.record_codec import decode_parsed, encode_parsed
from evodsp.data.shards import Entry, Table, digest_of, shard_name, write_index, write_shard
from evodsp.data.store import FeatureStore
from evodsp.errors import UserError

CHAINS = 634_434
"""Of the PDB and of OpenProteinSet's UniClust30 clusters together."""
PER_SHARD = 64
Reader = Callable[[str], object]
Format = Callable[[Path, dict[str, ParsedChain], dict[str, bytes], list[str]], Reader]


def chain_of(key: str) -> str:
    """The chain of which a key is a copy."""
    return key.partition("/")[2]


def shards(folder: Path, _: dict[str, ParsedChain], records: dict[str, bytes], keys: list[str]) -> Reader:
    written = []
    for number, first in enumerate(range(0, len(keys), PER_SHARD)):
        some = ((key, records[chain_of(key)], 0, 0) for key in keys[first : first + PER_SHARD])
        written.append(write_shard(folder / shard_name(number), some))
    digest = write_index(folder / "index.npy", written)
    return Table(LocalFileSystem(), str(folder), digest).read


def lmdb(folder: Path, _: dict[str, ParsedChain], records: dict[str, bytes], keys: list[str]) -> Reader:
    import lmdb as library

    with library.open(str(folder), map_size=1 << 34) as database, database.begin(write=True) as transaction:
        for key in keys:
            transaction.put(key.encode(), records[chain_of(key)])
    reading = library.open(str(folder), readonly=True, lock=False).begin(buffers=False)

    def read(key: str) -> object:
        data = bytes(reading.get(key.encode()) or b"")
        digest_of(data)  # as evodsp's shards do
        return data

    return read


def parquet(folder: Path, _: dict[str, ParsedChain], records: dict[str, bytes], keys: list[str]) -> Reader:
    import pyarrow
    from pyarrow import parquet as library

    schema = pyarrow.schema([("key", pyarrow.string()), ("record", pyarrow.binary())])
    files = []
    for number, first in enumerate(range(0, len(keys), PER_SHARD)):
        some = keys[first : first + PER_SHARD]
        with library.ParquetWriter(
            folder / f"{number}.parquet", schema, compression="none", use_dictionary=False
        ) as file:
            for key in some:  # a row group for each record: a reader takes whole row groups
                rows = {"key": [key], "record": [records[chain_of(key)]]}
                file.write_table(pyarrow.table(rows, schema=schema))
        files.append(library.ParquetFile(folder / f"{number}.parquet", memory_map=True))
    row_of = {key: row for row, key in enumerate(keys)}

    def read(key: str) -> object:
        group = files[row_of[key] // PER_SHARD].read_row_group(row_of[key] % PER_SHARD, columns=["record"])
        data = group.column(0)[0].as_py()
        digest_of(data)
        return data

    return read


def zarr(folder: Path, parsed: dict[str, ParsedChain], _: dict[str, bytes], keys: list[str]) -> Reader:
    import zarr as library
    from zarr.codecs import ZstdCodec

    root = library.open_group(str(folder), mode="w")
    for key in keys:
        chain = parsed[chain_of(key)]
        group = root.create_group(key)
        deletions = np.flatnonzero(chain.msa.deletions)
        exists = chain.chain.mask != 0
        arrays = {
            "msa": chain.msa.msa.view(np.uint8),
            "profile": chain.msa.profile,
            "deletion_steps": np.diff(deletions, prepend=0).astype(np.uint32),
            "deletion_counts": chain.msa.deletions.ravel()[deletions].astype(np.uint16),
            "atom_exists": np.packbits(exists),
            "atom_positions": chain.chain.positions[exists],
        }
        for name, array in arrays.items():
            chunks = tuple(max(1, size) for size in array.shape)
            compressors = ZstdCodec(level=9, checksum=True)
            group.create_array(name, data=array, chunks=chunks, compressors=compressors)
    opened = library.open_group(str(folder), mode="r")
    return lambda key: {name: array[...] for name, array in opened[key].arrays()}


FORMATS: dict[str, tuple[str | None, Format]] = {
    "tar shards": (None, shards),
    "LMDB": ("lmdb", lmdb),
    "Parquet": ("pyarrow", parquet),
    "Zarr": ("zarr", zarr),
}


def chains_of(folders: list[Path]) -> tuple[dict[str, ParsedChain], dict[str, float]]:
    """The readable chains of the folders, and the seconds that parsing each took."""
    parsed, seconds = {}, {}
    for folder in folders:
        store = FeatureStore(folder / "alignments", folder / "mmcif_files")
        for key in store.keys():  # noqa: SIM118
            begun = time.perf_counter()
            try:
                parsed[key] = store.parsed(key, with_hits=True)
            except UserError:
                continue
            seconds[key] = time.perf_counter() - begun
    return parsed, seconds


def in_ms(seconds: Iterable[float]) -> str:
    times = [second * 1e3 for second in seconds]
    return f"{statistics.median(times):.3f} ms median, {statistics.mean(times):.3f} ms mean"


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def private_bytes() -> int:
    """Memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def big_index(folder: Path) -> str:
    """Write and open the index of `CHAINS` chains."""
    keys = sorted(
        f"{number:06x}_{letter}" for number in range(CHAINS // 26 + 1) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    entries = [Entry(key, 512, 1000, "00" * 16, 300, 0) for key in keys[:CHAINS]]
    digest = write_index(folder / "index.npy", [entries])
    del entries
    before, begun = private_bytes(), time.perf_counter()
    table = Table(LocalFileSystem(), str(folder), digest)
    opened, after = time.perf_counter() - begun, private_bytes()
    begun = time.perf_counter()
    for key in keys[:: len(keys) // 1000]:
        assert key in table or key not in keys[:CHAINS]
    looked_up = (time.perf_counter() - begun) / 1000
    size = (folder / "index.npy").stat().st_size
    return (
        f"index of {CHAINS:,} chains: {size / 1e6:.0f} MB, opened and checked in {opened:.2f} s, "
        f"{max(0, after - before) / 2**20:.1f} MiB of private memory, a key found in {looked_up * 1e6:.0f} us"
    )


def measure(folders: list[Path], copies: int, reads: int) -> list[str]:
    """The lines of the report."""
    parsed, seconds = chains_of(folders)
    records = {key: encode_parsed(chain) for key, chain in parsed.items()}
    keys = sorted(f"{number:04}/{key}" for number in range(copies) for key in records)
    picked = random.Random(0).sample(keys, min(reads, len(keys)))
    lines = [
        f"{len(records)} chains of {', '.join(folder.name for folder in folders)}, {copies} times each = {len(keys)} records"
    ]
    with tempfile.TemporaryDirectory() as temporary:
        readers: dict[str, Reader] = {}
        sizes: dict[str, int] = {}
        for name, (package, make) in FORMATS.items():
            if package is not None and find_spec(package) is None:
                lines.append(f"{name}: not installed")
                continue
            folder = Path(temporary) / name.replace(" ", "_")
            folder.mkdir()
            readers[name] = make(folder, parsed, records, keys)
            sizes[name] = size_of(folder)
        times: dict[str, list[float]] = {name: [] for name in readers}
        for key in picked:
            for name, read in readers.items():
                begun = time.perf_counter()
                read(key)
                times[name].append(time.perf_counter() - begun)
        lines += ["", f"{'format':<12} {'MB':>8} {'read, median ms':>16} {'read, mean ms':>14}"]
        for name in readers:
            median, mean = statistics.median(times[name]) * 1e3, statistics.mean(times[name]) * 1e3
            lines.append(f"{name:<12} {sizes[name] / 1e6:>8.1f} {median:>16.3f} {mean:>14.3f}")
        decoding = []
        for key in picked:
            begun = time.perf_counter()
            decode_parsed(records[chain_of(key)], with_hits=True)
            decoding.append(time.perf_counter() - begun)
        lines += [
            "",
            f"decoding a record: {in_ms(decoding)} (Zarr's reading includes it)",
            f"parsing the files of a chain instead: {in_ms(seconds.values())}",
        ]
        index = Path(temporary) / "index"
        index.mkdir()
        lines.append(big_index(index))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=50)
    parser.add_argument("--reads", type=int, default=400)
    options = parser.parse_args()
    packages = ("numpy", "zstandard", "safetensors", "lmdb", "pyarrow", "zarr")
    versions = ", ".join(f"{name} {version(name)}" for name in packages if find_spec(name))
    head = [
        f"{date.today()}, {platform.machine()}, one thread of a shared machine; Python {platform.python_version()}, {versions}",
        f"python -m scripts.benchmarks.feature_store --copies {options.copies} --reads {options.reads}",
    ]
    lines = [*head, "", *measure(options.data, options.copies, options.reads)]
    options.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
