"""A random sample for checks and benchmarks: features of the model, and labels for every term of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.config import LossConfig
from evodsp.geometry.frames import structure_labels
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK, RESTYPE_ATOM37_MASK

EVERY_TERM = LossConfig(experimentally_resolved=0.01, violation=1.0, pae=0.1)
"""The weights of fine-tuning: every term of the loss is computed."""


def random_features(
    sequences: int, extra: int, residues: int, templates: int = 0, cycles: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """Processed features of one sample, of shapes [1, cycles, ...] and without padding. They are a function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    s, e, r, t = sequences, extra, residues, templates

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, cycles, *shape, generator=generator)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, (1, cycles, *shape), generator=generator, dtype=torch.int32)

    def ones(*shape: int) -> Tensor:
        return torch.ones(1, cycles, *shape)

    features = {
        "aatype": integers(20, r)[:, :1].expand(-1, cycles, -1),
        "residue_index": torch.arange(r, dtype=torch.int32).expand(1, cycles, r),
        "seq_mask": ones(r),
        "target_feat": normal(r, 22),
        "msa_feat": normal(s, r, 49),
        "msa_mask": ones(s, r),
        "extra_msa": integers(23, e, r),
        "extra_msa_mask": ones(e, r),
        "extra_has_deletion": normal(e, r).sign().clamp(min=0),
        "extra_deletion_value": normal(e, r),
    }
    if templates:
        features |= {
            "template_aatype": integers(22, t, r),
            "template_all_atom_positions": 10 * normal(t, r, 37, 3),
            "template_all_atom_masks": ones(t, r, 37),
            "template_pseudo_beta": 10 * normal(t, r, 3),
            "template_pseudo_beta_mask": ones(t, r),
            "template_mask": ones(t),
        }
    return features


def with_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The features `batch` of one sample with labels for every term of the loss: atoms anywhere within 20 Å or so."""
    generator = torch.Generator().manual_seed(1)
    passes, sequences, residues = batch["msa_feat"].shape[1:4]
    aatype = batch["aatype"][0, 0].long()
    exists = torch.from_numpy(RESTYPE_ATOM37_MASK).float()[aatype]
    positions = 10 * torch.randn(residues, 37, 3, generator=generator) * exists[..., None]
    labels = {name: value[None] for name, value in structure_labels(aatype, positions, exists).items()}
    features = {
        "atom37_atom_exists": exists,
        "atom14_atom_exists": torch.from_numpy(RESTYPE_ATOM14_MASK).float()[aatype],
        "true_msa": torch.randint(22, (sequences, residues), generator=generator),
        "bert_mask": (torch.rand(sequences, residues, generator=generator) < 0.15).float(),
    }
    return {
        **labels,
        **batch,
        **{name: value.expand(1, passes, *value.shape) for name, value in features.items()},
        "resolution": torch.tensor([2.0]),
    }
