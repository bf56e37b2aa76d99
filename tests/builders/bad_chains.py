"""A data set with bad chains of every kind, and callbacks of `evodsp fit` that plant and record them."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from evodsp.training.chains import ChainDataModule
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
