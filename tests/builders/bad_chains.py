"""Data sets with bad chains of every kind and with predictions, and callbacks of `evodsp fit` that plant and record them."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from evodsp.data.formats.mmcif import read_chain
from evodsp.geometry.residues import RESTYPE_ORDER
from evodsp.training.chains import ChainDataModule
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.chains import AMINO_ACIDS
from tests.builders.planted_store import KILLER, SLEEPER, PlantedStore
from tests.builders.training_chains import TINY, write_chain

BAD = ["9qry_A", "9cut_A", "9bin_A", SLEEPER, KILLER]
"""Chains with the alignment of another query, a truncated structure, bytes that are no text, and two that `Plant` makes bad."""


def write_data_set(folder: Path, good: int) -> Path:
    """`good` chains that can be read, those of `BAD`, and the options of a run on all of them."""
    generator = np.random.default_rng(3)
    keys = [f"1{number:03d}_A" for number in range(good)] + BAD
    for key in keys:
        write_chain(folder, key, "".join(generator.choice(list(AMINO_ACIDS), generator.integers(11, 16))))
    (folder / "alignments" / BAD[0] / "uniref90_hits.a3m").write_text(">q\nMKTAYIAKQRW\n")
    structure = folder / "mmcif_files" / "9cut.cif"
    structure.write_text(structure.read_text()[: structure.stat().st_size // 2])
    (folder / "alignments" / BAD[2] / "uniref90_hits.a3m").write_bytes(b"\xff\xfe\x00")
    folders = f"  alignment_dir: {folder}/alignments\n  structure_dir: {folder}/mmcif_files\n"
    workers = f"  train_chains: [{', '.join(keys)}]\n  num_workers: 1\n  time_limit: 5\n"
    options = TINY.replace("data:\n", "data:\n" + folders + workers).replace("[1abc_A]", "[1000_A]")
    (folder / "run.yaml").write_text(options)
    return folder / "run.yaml"


class Record(Callback):
    """Writes the number and a checksum of every sample to `samples_<rank>.jsonl` in the run's folder."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        path = Path(trainer.default_root_dir) / f"samples_{os.environ.get('RANK', 0)}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps([batch["sample_index"].tolist()[0], digest(batch)]) + "\n")


class Plant(Record):
    """`Record`, on a data set with a `PlantedStore`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data: ChainDataModule = trainer.datamodule  # type: ignore[attr-defined]
        store = data.chains.store
        planted = PlantedStore(store.alignment_dir, store.structure_dir)
        data.chains = dataclasses.replace(data.chains, store=planted)


def samples(output: Path, rank: int = 0) -> dict[int, int]:
    """Checksums by sample, of a run with `Record`. A sample that was repeated must be the same."""
    found: dict[int, int] = {}
    for line in (output / f"samples_{rank}.jsonl").read_text().splitlines():
        index, checksum = json.loads(line)
        assert found.setdefault(index, checksum) == checksum, f"sample {index} differs when it is repeated"
    return found


def digest(batch: Mapping[str, Tensor]) -> int:
    """A checksum of names, shapes, types and values; it differs for other samples, crops or random draws."""
    number = 0
    for name in sorted(batch):
        value = batch[name].detach().cpu().reshape(-1)
        number = zlib.crc32(f"{name} {tuple(batch[name].shape)} {value.dtype}".encode(), number)
        number = zlib.crc32(value.contiguous().numpy().tobytes(), number)
    return number


UNSURE = RESTYPE_ORDER["W"]
"""Predicted structures are unsure of all tryptophans, and sure of all other residues."""
SURE_PLDDT, UNSURE_PLDDT = 90.0, 49.9
RESIDUE_LABELS = (
    "all_atom_positions",
    "torsion_angles_sin_cos",
    "alt_torsion_angles_sin_cos",
    "rigidgroups_gt_frames",
    "rigidgroups_alt_gt_frames",
    "atom14_gt_positions",
    "atom14_alt_gt_positions",
    "chi_angles",
    "pseudo_beta",
)
RESIDUE_MASKS = ("all_atom_mask", "backbone_affine_mask", "pseudo_beta_mask", "torsion_angles_mask", "rigidgroups_gt_exists",
    "atom14_gt_exists", "atom14_alt_gt_exists", "chi_mask")  # fmt: skip


def write_sets(folder: Path, chains: int = 4) -> Path:
    """`chains` chains of experiments, as many of predictions, and the options of a run on both. Each chain has a W or more."""
    generator = np.random.default_rng(5)
    for kind, number in (("experiments", 1), ("predictions", 2)):
        (folder / kind).mkdir()
        for chain in range(chains):
            letters = generator.choice(list(AMINO_ACIDS), 13)
            letters[[3, 9]] = "W"  # each crop of ten residues has one of them
            write_chain(folder / kind, f"{number}{chain:03d}_A", "".join(letters))
    for path in (folder / "predictions" / "mmcif_files").iterdir():
        chain = read_chain(path, "A")
        plddt = np.where(np.array(list(chain.sequence)) == "W", UNSURE_PLDDT, SURE_PLDDT)
        write_mmcif(path, [replace(chain, resolution=None)], [plddt])
    places = {
        kind: f"alignment_dir: {folder}/{kind}/alignments, structure_dir: {folder}/{kind}/mmcif_files"
        for kind in ("experiments", "predictions")
    }
    roots = "  " + places["experiments"].replace(", ", "\n  ") + f"\n  distillation: {{{places['predictions']}}}\n"
    (folder / "run.yaml").write_text(TINY.replace("data:\n", "data:\n" + roots).replace("[1abc_A]", "null"))
    return folder / "run.yaml"


class RecordSource(Record):
    """`Record`; also writes, to `sources_<rank>.jsonl`, of each sample: its number, whether it is a prediction, the largest
    mask of a label of its tryptophans, and the smallest number of observed atoms of another residue."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        unsure = batch["aatype"][:, 0] == UNSURE
        masks = max(float(batch[name][unsure].max()) for name in RESIDUE_MASKS)
        atoms = float(batch["all_atom_mask"][~unsure].sum(-1).min())
        path = Path(trainer.default_root_dir) / f"sources_{os.environ.get('RANK', 0)}.jsonl"
        with path.open("a") as file:
            predicted = float(batch["resolution"][0]) == 0
            file.write(json.dumps([int(batch["sample_index"][0]), predicted, masks, atoms]) + "\n")


class Poison(RecordSource):
    """`RecordSource`; then the labels of what a prediction is unsure of are replaced by nonsense."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if float(batch["resolution"][0]) == 0:
            unsure = batch["aatype"][:, 0] == UNSURE
            for name in RESIDUE_LABELS:
                shape = (*unsure.shape, *[1] * (batch[name].dim() - unsure.dim()))
                batch[name] = torch.where(unsure.view(shape), batch[name] + 17, batch[name])


def sources(output: Path, rank: int = 0) -> dict[int, tuple[bool, float, float]]:
    """What `RecordSource` wrote, by sample."""
    lines = (output / f"sources_{rank}.jsonl").read_text().splitlines()
    return {index: tuple(found) for index, *found in map(json.loads, lines)}
