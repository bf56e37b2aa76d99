"""Alignments: random ones in memory, folders of files, OpenFold's alignment database, OpenFold3's archives."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np

from evodsp.data.records import Alignment
from evodsp.data.sources.layout import parse_alignment_file
from evodsp.geometry.residues import decode, encode_sequence


def make_alignment(letters: str, rows: int = 9, source: str = "hits.a3m") -> Alignment:
    """A random alignment whose first row is `letters`."""
    rng = np.random.default_rng(rows)
    msa = rng.integers(0, 22, (rows, len(letters))).astype(np.int8)
    msa[0] = encode_sequence(letters)
    deletions = (rng.integers(0, 5, msa.shape) * (rng.random(msa.shape) < 0.3)).astype(np.int32)
    return Alignment(source, tuple(f"row{i}" for i in range(rows)), msa, deletions)


def chain_folder(root: Path, key: str, files: dict[str, str]) -> Path:
    """Write the given files (name: text) into the folder `key` below `root`. Files named *.gz are gzipped."""
    for name, text in files.items():
        path = root / key / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return root / key


def database(root: Path, chains: dict[str, dict[str, str]]) -> Path:
    """Write OpenFold's alignment database into `root`, with the given files (name: text) of each chain."""
    index, data = {}, b"unused"
    for key, files in chains.items():
        index[key] = {"db": "alignment_db_0.db", "files": []}
        for name, text in files.items():
            index[key]["files"].append([name, len(data), len(text.encode())])
            data += text.encode()
    (root / "alignment_db_0.db").write_bytes(data)
    (root / "alignment_db.index").write_text(json.dumps(index))
    return root


def preparsed(path: Path, alignments: dict[str, Alignment]) -> Path:
    """Write the alignments of a chain (name without suffix: alignment) as OpenFold3's script does, as pickled dictionaries."""
    entries = {
        name: {
            "msa": np.array([list(decode(row)) for row in alignment.residues]),
            "deletion_matrix": alignment.deletions.astype(np.int64),
            "metadata": np.array(alignment.names),
        }
        for name, alignment in alignments.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **entries)  # type: ignore[arg-type]
    return path


def in_folders(root: Path, chains: dict[str, list[Path]]) -> None:
    """A folder for each chain, some of whose files lie in sub-folders."""
    for key, files in chains.items():
        for number, file in enumerate(files):
            place = root / key / ("", file.suffix[1:])[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)


def archives(root: Path, chains: dict[str, list[Path]]) -> None:
    """OpenFold3's archives, beside the places of folders."""
    for key, files in chains.items():
        preparsed(root / f"{key}.npz", {path.stem: parse_alignment_file(path)[0] for path in files})


def archives_in_folders(root: Path, chains: dict[str, list[Path]]) -> None:
    """OpenFold3's archives, in folders."""
    for key, files in chains.items():
        preparsed(root / key / "alignment.npz", {path.stem: parse_alignment_file(path)[0] for path in files})


def one_database(root: Path, chains: dict[str, list[Path]]) -> None:
    """OpenFold's alignment database."""
    root.mkdir()
    database(root, {key: {path.name: path.read_text() for path in files} for key, files in chains.items()})
