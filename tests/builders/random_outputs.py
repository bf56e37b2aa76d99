"""Random outputs of a model, for the losses."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.config import HeadsConfig
from evodsp.geometry.frames import Rigid
from evodsp.model.heads import ModelOutput, StructureOutput
from evodsp.parallel.exchange import Exchange
from tests.builders.labelled_batch import CLUSTERS, RESIDUES, Source

ITERATIONS = 3
# Few bins: `Largest` must find tensors of positions, so logits must not be larger.
HEADS = HeadsConfig(distogram_max_distance=12.0, distogram_bins=6, pae_bins=5)
Tensors = dict[str, Tensor]


def leaves_of(samples: int, residues: int = RESIDUES) -> Tensors:
    """Random model outputs in full, as leaves of the graph."""
    source, b, r, t = Source(10 + samples), samples, residues, ITERATIONS
    return {
        "backbone_rotation": torch.linalg.qr(source.normal(t, b, r, 3, 3)).Q,
        "backbone_translation": source.normal(t, b, r, 3, scale=5),
        "angles": torch.nn.functional.normalize(source.normal(t, b, r, 7, 2), dim=-1),
        "unnormalized_angles": source.normal(t, b, r, 7, 2),
        "frame_rotation": torch.linalg.qr(source.normal(b, r, 8, 3, 3)).Q,
        "frame_translation": source.normal(b, r, 8, 3, scale=5),
        "atom14": source.normal(b, r, 14, 3, scale=3),  # many clashes
        "positions": source.normal(b, r, 37, 3, scale=4),
        "plddt_logits": source.normal(b, r, HEADS.plddt_bins),
        "experimentally_resolved_logits": source.normal(b, r, 37),
        "distogram_logits": source.normal(b, r, r, HEADS.distogram_bins),
        "predicted_aligned_error_logits": source.normal(b, r, r, HEADS.pae_bins),
        "masked_msa_logits": source.normal(b, CLUSTERS, r, 23),
    }


def output_of(leaves: Tensors, exchange: Exchange) -> ModelOutput:
    """The model's output on this rank, made from `leaves`."""
    b, r = leaves["atom14"].shape[:2]
    here = exchange.owned(r)
    unread = leaves["atom14"].new_zeros
    structure = StructureOutput(
        backbone=Rigid(leaves["backbone_rotation"], leaves["backbone_translation"]),
        angles=leaves["angles"],
        unnormalized_angles=leaves["unnormalized_angles"],
        frames=Rigid(leaves["frame_rotation"], leaves["frame_translation"]),
        atom14=leaves["atom14"],
        positions=leaves["positions"],
        mask=unread(b, r, 37),
        single=unread(b, r, 4),
    )
    width = here.stop - here.start
    return ModelOutput(
        {
            "msa": unread(b, CLUSTERS, width, 2), "first_row": unread(b, r, 2), "pair": unread(b, r, width, 3),
            "single": unread(b, r, 4),
        },
        structure,
        {name.removesuffix("_logits"): leaf for name, leaf in leaves.items() if name.endswith("_logits")},
    )  # fmt: skip
