"""Compare evodsp's readers and features with OpenFold's own code, on the files of a data set: a part of `make parity`.

    OPENFOLD_SOURCE=<clone> .venv/bin/python -m scripts.parity.data --openfold <python with its requirements> --data FOLDER

FOLDER holds `mmcif_files` and `alignments`. Both sides read every structure (sequence, positions, masks, resolution, release
date), every alignment (rows, deletions) and every HHsearch result, make template features of the hits that have a structure,
and features and labels of every chain that has both, with the same random numbers. The exit code is 1 if a difference is larger
than allowed, and 2 if a side could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evodsp.config import FeatureConfig
from evodsp.data.formats import parse_hhr
from evodsp.data.formats.mmcif import read_structure
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import collate
from evodsp.data.samples.raw_features import max_clusters, piece, raw_features
from evodsp.data.samples.sample_records import chain_labels
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.layout import (
    StructureListing,
    alignment_files,
    parse_alignment_file,
    parse_alignments,
    search_result_files,
    split_key,
)
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError
from evodsp.features.batch import draw, with_features
from evodsp.geometry.residues import encode_sequence
from evodsp.rng import Draws

from .compare import other_side
from .table import Row, text

CLUSTERS, EXTRA = 128, 1024
ALLOWED = {
    "sample msa_feat": 1e-6,  # quotients and arc tangents in float32
    "sample extra_deletion_value": 1e-6,
    "sample chi_angles_sin_cos": 1e-5,
    "sample rigidgroups_gt_frames": 1e-5,  # Å
    "sample rigidgroups_alt_gt_frames": 1e-5,
    "sample backbone_rigid_tensor": 1e-5,
}
"""Largest difference of a quantity; the others must be equal."""

FEATURES = ("aatype", "residue_index", "seq_length", "seq_mask", "target_feat", "msa_feat", "msa_mask", "msa_row_mask",
    "true_msa", "bert_mask", "extra_msa", "extra_msa_mask", "extra_msa_row_mask", "extra_has_deletion", "extra_deletion_value",
    "atom14_atom_exists", "atom37_atom_exists", "residx_atom14_to_atom37", "residx_atom37_to_atom14")  # fmt: skip
LABELS = ("all_atom_positions", "all_atom_mask", "resolution", "atom14_gt_positions", "atom14_gt_exists",
    "atom14_alt_gt_positions", "atom14_alt_gt_exists", "atom14_atom_is_ambiguous", "pseudo_beta", "pseudo_beta_mask",
    "chi_angles_sin_cos", "chi_mask", "backbone_rigid_tensor", "backbone_rigid_mask", "rigidgroups_gt_frames",
    "rigidgroups_gt_exists", "rigidgroups_group_exists", "rigidgroups_group_is_ambiguous",
    "rigidgroups_alt_gt_frames")  # fmt: skip
"""What is compared of a sample, by OpenFold's names."""

Results = dict[str, np.ndarray]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare evodsp's readers and features with OpenFold's.")
    parser.add_argument("--openfold", type=Path, required=True, help="python with OpenFold, or with its requirements")
    parser.add_argument("--data", type=Path, required=True, help="folder with mmcif_files/ and alignments/")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and masking")
    return parser.parse_args(arguments)


def request_of(data: Path) -> dict[str, Any]:
    """The files that are compared. Gzipped files and .pdb files, which OpenFold's functions do not take, are left out."""
    store = ChainFiles(data / "alignments", data / "mmcif_files")
    listed = StructureListing(data / "mmcif_files")
    structure_of, keys = {}, store.keys()
    for key in keys:
        path = listed.of_entry(split_key(key)[0])
        if path is not None:
            structure_of[key] = str(data / "mmcif_files" / path)
    folders = {key: data / "alignments" / key for key in keys}
    searches = {key: [str(p) for p in search_result_files(f) if p.suffix == ".hhr"] for key, f in folders.items()}
    queries = {key: store.query(key).letters for key, paths in searches.items() if paths}
    return {
        "templates": {"folder": str(data / "mmcif_files"), "queries": queries},
        "structures": sorted(map(str, (data / "mmcif_files").glob("*.cif"))),
        "alignments": {key: [str(path) for path in alignment_files(folder)] for key, folder in folders.items()},
        "rows": {
            str(path): len(read[0])
            for folder in folders.values()
            for path in alignment_files(folder)
            if (read := parse_alignments([(path, None)]))
        },
        "searches": searches,
        "samples": structure_of,
        "sizes": {"clusters": CLUSTERS, "extra": EXTRA},
        "compared": FEATURES + LABELS,
    }


def file_results(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What evodsp reads, under the names of OpenFold's side."""
    for path in map(Path, request["structures"]):
        structure = read_structure(path)
        for name, chain in structure.chains.items():
            file = f"{path.name} {name}"
            yield f"structure sequence|{file}", chain.sequence
            yield f"structure positions|{file}", chain.positions
            yield f"structure mask|{file}", chain.mask
            yield f"structure resolution|{file}", np.float32(structure.resolution or 0)
            yield f"structure release date|{file}", str(structure.release_date)
    for key, paths in request["alignments"].items():
        for path in map(Path, paths):
            (alignment,) = parse_alignment_file(path)
            yield f"alignment rows|{key}/{path.name}", alignment.residues
            yield f"alignment deletions|{key}/{path.name}", alignment.deletions
    for key, paths in request["searches"].items():
        for path in map(Path, paths):
            for hit in parse_hhr(path):
                file = f"{key}/{path.name} {hit.index}"
                yield f"hit name|{file}", hit.name
                yield f"hit rows|{file}", f"{hit.query}\n{hit.hit_sequence}"
                yield f"hit columns|{file}", hit.aligned_columns
                yield f"hit sum of probabilities|{file}", hit.sum_probs
                yield f"hit query indices|{file}", hit.indices_query
                yield f"hit indices|{file}", hit.indices_hit


def template_results(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The templates that evodsp makes of the searches, best first, under the names of OpenFold's side."""
    source = TemplateSource.open(request["templates"]["folder"])
    for key, letters in request["templates"]["queries"].items():
        hits = [hit for path in request["searches"][key] for hit in parse_hhr(path)]
        found = source.find(hits, ProteinSequence(key, letters)).features
        for number, name in enumerate(found.names):
            yield f"template name|{key} {number}", name
            for feature, values in found.processed().items():
                yield f"{feature.replace('_', ' ', 1)}|{key} {number}", values[number]


def sample_results(data: Path, keys: list[str], seed: int) -> tuple[Results, Results]:
    """Features and labels of whole chains, and the random numbers that were used."""
    store = ChainFiles(data / "alignments", data / "mmcif_files")
    found: dict[str, Any] = {}
    used: dict[str, Any] = {}
    for number, key in enumerate(keys):
        parsed = store.parsed(key, with_hits=False)
        aatype, crop = encode_sequence(parsed.assembly.chains[0].sequence), piece(0, len(parsed.assembly.chains[0]))
        config = FeatureConfig(crop_size=len(crop), msa_clusters=CLUSTERS, extra_msa=EXTRA, recycles=0)
        raw = raw_features(aatype, parsed.chains[0].msa, config, Draws.root(seed).at("parity", number), 1, crop)
        sample = {name: torch.from_numpy(values) for name, values in raw.items()}
        rows, columns = parsed.chains[0].msa.msa.shape
        drawn = draw(sample["msa_keys"], sample["msa_kept"][None], min(max_clusters(config), rows), columns)
        used |= {f"{name}|{key}": getattr(drawn, name)[0].numpy() for name in ("order", "replace", "letter")}
        features = {name: values[0, 0].numpy() for name, values in with_features(collate([sample]), config).items()}
        labels = {name: label.numpy() for name, label in chain_labels(parsed.assembly.chains[0], aatype).items()}
        found |= {f"sample {name}|{key}": value for name, value in openfold_names(features | labels).items()}
    return found, used


def openfold_names(sample: Results) -> Results:
    """The arrays of a sample that are compared, in OpenFold's form."""
    chi = sample["chi_angles"]
    exists = sample["chi_mask"][..., None]
    frames = {name: _matrices(sample[name]) for name in ("rigidgroups_gt_frames", "rigidgroups_alt_gt_frames")}
    named = {
        **sample,
        **frames,
        "chi_angles_sin_cos": np.stack([np.sin(chi), np.cos(chi)], -1) * exists,
        "backbone_rigid_mask": sample["backbone_affine_mask"],
        "backbone_rigid_tensor": frames["rigidgroups_gt_frames"][:, 0],
    }
    return {name: named[name] for name in FEATURES + LABELS}


def _matrices(frames: np.ndarray) -> np.ndarray:
    """Frames of 12 numbers, the rotation first, as 4 x 4 matrices."""
    matrices = np.zeros((*frames.shape[:-1], 4, 4), frames.dtype)
    matrices[..., :3, :3] = frames[..., :9].reshape(*frames.shape[:-1], 3, 3)
    matrices[..., :3, 3], matrices[..., 3, 3] = frames[..., 9:], 1
    return matrices


def compare(ours: Results, theirs: Results, allowed: Mapping[str, float] = ALLOWED) -> list[Row]:
    """One row per quantity: the largest difference over all files; infinite if a side lacks a file or has another shape.

    `allowed`: the largest difference of each quantity; those that it does not name must be equal."""
    differences: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name in sorted({*ours, *theirs}):
        quantity, file = name.split("|")
        both = name in ours and name in theirs
        differences[quantity].append((_difference(ours[name], theirs[name]) if both else np.inf, file))
    rows = []
    for quantity, found in differences.items():
        worst, file = max(found)
        note = f"{len(found)} compared" + (f", worst: {file}" if worst else "")
        rows.append(Row(quantity, worst, allowed.get(quantity, 0.0), note))
    return rows


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return np.inf
    if ours.dtype.kind == "U":
        return 0.0 if ours == theirs else np.inf
    away = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0)
    return np.inf if np.isnan(away) else float(away)


def run(options: argparse.Namespace) -> int:
    request = request_of(options.data)
    start = time.perf_counter()
    ours = {name: np.asarray(value) for name, value in (*file_results(request), *template_results(request))}
    samples, draws = sample_results(options.data, list(request["samples"]), options.seed)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="evodsp-parity-") as folder:
        subject = Path(folder) / "subject.npz"
        np.savez(subject, allow_pickle=False, request=np.array(json.dumps(request)), **draws)
        start = time.perf_counter()
        theirs = other_side(options.openfold, "openfold_data_side", subject)
    if theirs is None:
        raise UserError(f"{options.openfold}: has no OpenFold; set OPENFOLD_SOURCE to a clone of it")
    print(f"OpenFold's readers and features ({time.perf_counter() - start:.0f} s) against evodsp ({seconds:.0f} s)")
    rows = compare(ours | samples, theirs)
    print(text(rows))
    return 0 if all(row.passed for row in rows) else 1


def main(arguments: list[str] | None = None) -> int:
    torch.set_num_threads(1)
    try:
        return run(parse(arguments))
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
