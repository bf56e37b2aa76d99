"""Time the scan of a large data set, and what its index costs a process that opens it.

    python -m scripts.benchmarks.data_index [--chains 634434] [--headers 6000] [--workers 2] [--folder DIR]

The data set is made of links to the bundled synthetic chains, three chains an entry. An eighth, a half and the whole of it are
scanned, so that the time a chain shows whether it grows. `--headers`: the largest data set that is scanned without a cache,
from the headers of the structures (one chain an entry). Memory is measured in a second process while a first one has the same
index open and has read all of it: what both share is not private to either. Last, a feature store of the bundled chains is
made, its index is given one key for each chain of the largest data set, and `evodsp fit` takes one step from it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from evodsp import __version__
from evodsp.cli import main as evodsp
from evodsp.data.feature_store import CHAINS, DESCRIPTION
from evodsp.data.shards import INDEX, Entry, write_index

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "data"
CHAINS_OF_ENTRY = 3
OPENED = """
import os, sys, time
import numpy as np
from evodsp.data.index import ChainIndex

def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024

before = private()
begun = time.perf_counter()
index = ChainIndex(sys.argv[1])
opened = time.perf_counter() - begun
table, content = index.table, index.content
for name in ("lengths", "resolutions", "release_days", "cluster_sizes", "largest_fractions", "representatives"):
    getattr(table, name).sum()
content.sequences.letters.sum()
index.keys.letters.sum()
rows = np.random.default_rng(0).integers(0, len(index), 1000)
keys = [index.keys[int(row)] for row in rows]
begun = time.perf_counter()
assert [index.row(key) for key in keys] == rows.tolist()
found = (time.perf_counter() - begun) / len(keys)
columns = private() - before
begun = time.perf_counter()
names = index.keys[:]
listed = time.perf_counter() - begun
print(opened, found, columns, listed, private() - before, flush=True)
sys.stdin.read()
"""


def make_data_set(folder: Path, chains: int, of_entry: int) -> None:
    """Links to the bundled chains in OpenFold's layout, `of_entry` chains an entry, their cache and a list of their names."""
    alignments, structures = folder / "alignments", folder / "mmcif_files"
    alignments.mkdir(parents=True)
    structures.mkdir()
    stored = json.loads((BUNDLED / "chain_data_cache.json").read_text())
    names = sorted(stored)
    cache = {}
    for number in range(chains):
        entry, letter = f"{number // of_entry:06d}", "ABC"[number % of_entry]
        name, key = names[number // of_entry % len(names)], f"{entry}_{letter}"
        os.symlink(BUNDLED / "alignments" / name, alignments / key)
        if letter == "A":
            os.symlink(BUNDLED / "mmcif_files" / f"{name.partition('_')[0]}.cif", structures / f"{entry}.cif")
        cache[key] = stored[name]
    (folder / "chain_data_cache.json").write_text(json.dumps(cache))
    (folder / "train.txt").write_text("\n".join(cache))


def cpu_seconds() -> float:
    """CPU time of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def scan(folder: Path, workers: int, cached: bool) -> tuple[float, float]:
    """Seconds of `evodsp data index`, and of CPU time in all its processes."""
    words = [
        "data",
        "index",
        "--alignment_dir",
        str(folder / "alignments"),
        "--structure_dir",
        str(folder / "mmcif_files"),
    ]
    words += ["--output", str(folder / "index"), "--workers", str(workers), "--overwrite"]
    if cached:
        words += ["--chain_data_cache", str(folder / "chain_data_cache.json")]
    begun, used = time.perf_counter(), cpu_seconds()
    with contextlib.redirect_stderr(io.StringIO()):
        code = evodsp(words)
    assert code == 0
    return time.perf_counter() - begun, cpu_seconds() - used


def start(folder: Path, indexed: bool, listed: bool) -> float:
    """Seconds until training knows its chains, imports not counted."""
    # Imported late: the processes of the scan import this module, and would import Lightning with it.
    from evodsp.training.chains import find_chains
    from evodsp.training.config import DataConfig

    index, chains = str(folder / "index") if indexed else None, str(folder / "train.txt") if listed else None
    alignments, structures = str(folder / "alignments"), str(folder / "mmcif_files")
    begun = time.perf_counter()
    find_chains(DataConfig(alignment_dir=alignments, structure_dir=structures, index=index, train_chains=chains))
    return time.perf_counter() - begun


def opened(index: Path) -> list[float]:
    """Seconds to open and to find a key, private MiB with all columns read; seconds to list all keys, private MiB with them."""
    words = [sys.executable, "-c", OPENED, str(index)]
    processes = []
    lines = []
    for _ in range(2):
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        lines.append(process.stdout.readline())
        processes.append(process)
    for process in processes:
        process.communicate("")
    return [float(number) for number in lines[-1].split()]


def first_step(folder: Path, chains: int) -> tuple[float, float]:
    """Seconds of `evodsp fit` with one step, from start to end: from a store with a key for every chain, and from one of the
    bundled chains alone."""
    stored, store = sorted(json.loads((BUNDLED / "chain_data_cache.json").read_text())), folder / "store"
    sources = ["--alignment_dir", str(BUNDLED / "alignments"), "--structure_dir", str(BUNDLED / "mmcif_files")]
    with contextlib.redirect_stderr(io.StringIO()):
        assert evodsp(["data", "build", *sources, "--output", str(store)]) == 0
    few = _fit_once(store, folder / "few")
    row_of = {row["key"].decode(): row for row in np.load(store / CHAINS / INDEX)}  # all in shard 0
    entries = []
    for number in range(chains):
        row = row_of[stored[number // CHAINS_OF_ENTRY % len(stored)]]
        key = f"{number // CHAINS_OF_ENTRY:06d}_{'ABC'[number % CHAINS_OF_ENTRY]}"
        offset, size, length, released = (int(row[name]) for name in ("offset", "size", "length", "released"))
        entries.append(Entry(key, offset, size, row["digest"].tobytes().hex(), length, released))
    description = json.loads((store / DESCRIPTION).read_text())
    description["tables"][CHAINS] = write_index(store / CHAINS / INDEX, [entries])
    (store / DESCRIPTION).write_text(json.dumps(description))
    return _fit_once(
        store, folder / "many", "--data.index", str(folder / "index"), "--data.sampling", "alphafold2"
    ), few


def _fit_once(store: Path, output: Path, *options: str) -> float:
    words = [
        sys.executable,
        "-m",
        "evodsp",
        "fit",
        "--config",
        str(ROOT / "configs/quickstart.yaml"),
        "--output",
        str(output),
    ]
    words += ["--data.store", str(store), "--data.train_chains", "null", "--data.validation_chains", "null"]
    begun = time.perf_counter()
    subprocess.run([*words, "--trainer.max_steps", "1", *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=634_434)
    parser.add_argument("--headers", type=int, default=6000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the data set is made (default: a temporary folder)")
    options = parser.parse_args(arguments)
    command = f"python -m scripts.benchmarks.data_index --chains {options.chains} --headers {options.headers}"
    print(f"{datetime.now():%Y-%m-%d}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.platform()}")
    print(f"evodsp {__version__}, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{command} --workers {options.workers}")
    print(
        "\nscan: `evodsp data index`, with its CPU time a chain; the others: until `fit` knows its chains, from folders,"
    )
    print("with a list of names, by the index")
    print(
        f"{'metadata':<10}{'chains':>9}{'scan s':>9}{'CPU s':>8}{'us/chain':>10}{'folders s':>11}{'list s':>9}{'index s':>9}",
        flush=True,
    )
    for cached, most in ((False, options.headers), (True, options.chains)):
        for part in (8, 2, 1):
            chains = most // part
            folder = Path(tempfile.mkdtemp(dir=options.folder)) / "data"
            make_data_set(folder, chains, CHAINS_OF_ENTRY if cached else 1)
            seconds, used = scan(folder, options.workers, cached)
            starts = [start(folder, *how) for how in ((False, False), (False, True), (True, False))]
            numbers = f"{seconds:>9.1f}{used:>8.1f}{1e6 * used / chains:>10.0f}"
            numbers += f"{starts[0]:>11.2f}{starts[1]:>9.2f}{starts[2]:>9.2f}"
            print(f"{'cache' if cached else 'headers':<10}{chains:>9,}{numbers}", flush=True)
            if cached and part == 1:
                bytes_on_disk = sum(path.stat().st_size for path in (folder / "index").iterdir())
                opening, finding, columns, listing, keys = opened(folder / "index")
                print(f"\nindex of {chains:,} chains, {bytes_on_disk / 2**20:.0f} MiB on disk")
                print(f"  opens in                                      {opening:.3f} s")
                print(f"  finds a key in                                {1e6 * finding:.0f} us")
                print(f"  private memory, all columns read              {columns:.1f} MiB")
                print(f"  private memory, all keys as a Python list too {keys:.1f} MiB ({listing:.2f} s)", flush=True)
                many, few = first_step(folder, chains)
                print("\n`evodsp fit` with one step, from start to end")
                print(f"  store of {chains:,} chains, weights of the index {many:.1f} s")
                print(f"  store of the bundled chains alone             {few:.1f} s")
            shutil.rmtree(folder.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
