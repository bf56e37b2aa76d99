"""An input of one's own: crosslinks and other restraints, as a pair feature from a file. docs/own_input.md explains it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from evodsp.config import EmbedderConfig
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.sample_records import Sample
from evodsp.features.batch import prediction_sample
from evodsp.inference.structure_files import PredictedStructure
from evodsp.model.alphafold import AlphaFold
from evodsp.model.embedders import RelativePosition
from evodsp.model.heads import compute_plddt
from evodsp.model.primitives import Linear
from evodsp.weights.checkpoint import load_model

BOUNDS = (8.0, 15.0, 25.0, 35.0)  # Å: a restraint is one-hot in the first bound that is not below its distance


class Restraints:
    """The feature of a sample, [iterations, R, R, bounds], from lines of a chain, two residues (from 1) and a distance (Å)."""

    def __init__(self, path: str) -> None:
        lines = [line.split() for line in Path(path).read_text().splitlines() if line.strip()]
        self.found = [(name, int(i) - 1, int(j) - 1, float(d)) for name, i, j, d in lines]

    def __call__(self, key: str, sample: Sample) -> Sample:
        index, kept = sample["residue_index"][0].tolist(), sample["seq_mask"][0].tolist()
        place = {residue: n for n, (residue, mask) in enumerate(zip(index, kept, strict=True)) if mask}  # of the crop
        feature = torch.zeros(len(index), len(index), len(BOUNDS))
        for name, i, j, distance in self.found:
            if name == key and i in place and j in place:
                bound = min(sum(bound < distance for bound in BOUNDS), len(BOUNDS) - 1)
                feature[place[i], place[j], bound] = feature[place[j], place[i], bound] = 1
        iterations = len(sample.get("msa_keys", sample["aatype"]))
        return {"restraints": feature.expand(iterations, -1, -1, -1)}


class Embedding(RelativePosition):
    """Adds the restraints to the first pair representation, beside the relative positions. At first it adds zero."""

    def __init__(self, c_z: int, config: EmbedderConfig) -> None:
        super().__init__(c_z, config)
        self.restraints = Linear(len(BOUNDS), c_z, bias=False, init="final")

    def forward(self, features: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:  # type: ignore[override]
        own = features["restraints"][:, rows, columns]  # a rank has some of the columns
        return super().forward(features, rows, columns) + self.restraints(own)


def add(model: AlphaFold) -> None:
    """Give a model the embedding. It keeps its weights."""
    if "restraints" not in model.features:
        embedding, before = Embedding(model.config.channels.pair, model.config.embedder), model.input_embedder
        embedding.to(before.relative_position.weight.device).load_state_dict(
            {**embedding.state_dict(), **before.relative_position.state_dict()}
        )
        before.relative_position, model.features = embedding, (*model.features, "restraints")


class WithRestraints(Callback):
    """For `evodsp fit`: the embedding in the model, and the feature in each sample."""

    def __init__(self, path: str) -> None:
        self.feature = Restraints(path)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        add(pl_module.model)
        trainer.datamodule.added = self.feature


def predict(checkpoint: str, path: str, name: str, letters: str) -> PredictedStructure:
    """The structure of a chain, from its sequence and the restraints under its name."""
    model = load_model(checkpoint, add=add)
    assert model.trained_features is not None
    sample = prediction_sample(ProteinSequence(name, letters), [], model.trained_features, seed=0)
    batch = {key: values[None] for key, values in (sample | Restraints(path)(name, sample)).items()}
    with torch.inference_mode():
        output = model(batch)
    plddt, structure = compute_plddt(output.logits["plddt"])[0], output.structure
    codes, atoms = batch["aatype"][0, 0].numpy(), (structure.positions[0].numpy(), structure.mask[0].numpy())
    return PredictedStructure(name, codes, *atoms, plddt.numpy())
