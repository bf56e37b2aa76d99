"""Time evodsp's parsers against character loops and Biopython, on your own files.

    python scripts/benchmarks/parsing.py --alignments DIR --structures DIR [--rounds 9]

Each round, every parser reads every file once, so that other load on the machine affects all of them. The table shows the
median over rounds and its ratio to evodsp's. The A3M and Stockholm baselines split the file into records, then visit every
character to count deletions and look up its code. Biopython's mmCIF time ends with its Structure object.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from Bio import AlignIO
from Bio.PDB.MMCIFParser import MMCIFParser
from Bio.SeqIO.FastaIO import SimpleFastaParser

from evodsp.data.mmcif import read_structure
from evodsp.data.parsers import parse_a3m, parse_stockholm
from evodsp.geometry.alphabet import RESTYPE_ORDER


def a3m_by_characters(path: Path) -> list[tuple[list[int], list[int]]]:
    """Codes and deletions of every row, one character at a time."""
    rows = []
    with path.open() as file:
        for _, letters in SimpleFastaParser(file):
            codes, deletions, deleted = [], [], 0
            for letter in letters:
                if letter.islower():
                    deleted += 1
                else:
                    codes.append(21 if letter == "-" else RESTYPE_ORDER.get(letter, 20))
                    deletions.append(deleted)
                    deleted = 0
            rows.append((codes, deletions))
    return rows


def stockholm_by_characters(path: Path) -> list[tuple[list[int], list[int]]]:
    """Codes and deletions of every row in the query's columns, one character at a time."""
    letters_of: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith(("#", "//")):
            name, chunk = line.split()
            letters_of[name] = letters_of.get(name, "") + chunk
    query = next(iter(letters_of.values()))
    rows = []
    for row in letters_of.values():
        codes, deletions, deleted = [], [], 0
        for letter, query_letter in zip(row, query, strict=True):
            if query_letter == "-":
                deleted += letter != "-"
            else:
                codes.append(21 if letter == "-" else RESTYPE_ORDER.get(letter, 20))
                deletions.append(deleted)
                deleted = 0
        rows.append((codes, deletions))
    return rows


def biopython_stockholm(path: Path) -> object:
    return AlignIO.read(path, "stockholm")


def biopython_mmcif(path: Path) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MMCIFParser(QUIET=True).get_structure(path.stem, path)


CONTENDERS: dict[str, dict[str, Callable[[Path], object]]] = {
    "a3m": {"evodsp": parse_a3m, "character loop": a3m_by_characters},
    "sto": {
        "evodsp": parse_stockholm,
        "character loop": stockholm_by_characters,
        "Bio.AlignIO (strings only)": biopython_stockholm,
    },
    "cif": {"evodsp": read_structure, "Bio.PDB.MMCIFParser": biopython_mmcif},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--alignments", type=Path, required=True, help="folder that is searched for .a3m and .sto files"
    )
    parser.add_argument("--structures", type=Path, required=True, help="folder of .cif files")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: %(default)s)")
    arguments = parser.parse_args()
    files = {
        "a3m": sorted(arguments.alignments.rglob("*.a3m")),
        "sto": sorted(arguments.alignments.rglob("*.sto")),
        "cif": sorted(arguments.structures.glob("*.cif")),
    }
    print(f"{'format':8}{'files':>6}{'MB':>8}  {'reader':28}{'median ms':>10}{'ratio':>8}")
    for kind, contenders in CONTENDERS.items():
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            for name, parse in contenders.items():
                start = time.perf_counter()
                for path in files[kind]:
                    parse(path)
                seconds[name].append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in files[kind]) / 1e6
        ours = statistics.median(seconds["evodsp"])
        for name, times in seconds.items():
            median = statistics.median(times)
            print(f"{kind:8}{len(files[kind]):6}{size:8.1f}  {name:28}{1e3 * median:10.1f}{median / ours:8.1f}")


if __name__ == "__main__":
    main()
