"""Random features and parameters for benchmarks, and the outputs that a backward pass can start from."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.model.outputs import ModelOutput
from evodsp.weights.random_parameters import randomise as randomise


def random_features(
    sequences: int, extra: int, residues: int, templates: int = 0, cycles: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """Processed features of one sample, shapes [1, cycles, ...], without padding; a function of `seed`."""
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


def output_tensors(output: ModelOutput) -> list[Tensor]:
    """All output tensors that a loss or the next recycling iteration reads."""
    structure = output.structure
    return [
        *output.representations.values(),
        *output.logits.values(),
        structure.angles,
        structure.unnormalized_angles,
        structure.atom14,
        structure.backbone.to_flat12(),
        structure.frames.to_flat12(),
    ]
