"""Inputs and parameters that mean nothing, and what a backward pass may start from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evodsp.model.outputs import ModelOutput


def random_features(
    sequences: int, extra: int, residues: int, templates: int = 0, cycles: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """Processed features of one sample, axes [1, cycles, ...], nothing masked; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    s, e, r, t = sequences, extra, residues, templates

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, cycles, *shape, generator=generator)

    def letters(most: int, *shape: int) -> Tensor:
        return torch.randint(most, (1, cycles, *shape), generator=generator, dtype=torch.int32)

    def ones(*shape: int) -> Tensor:
        return torch.ones(1, cycles, *shape)

    features = {
        "aatype": letters(20, r)[:, :1].expand(-1, cycles, -1),
        "residue_index": torch.arange(r, dtype=torch.int32).expand(1, cycles, r),
        "seq_mask": ones(r),
        "target_feat": normal(r, 22),
        "msa_feat": normal(s, r, 49),
        "msa_mask": ones(s, r),
        "extra_msa": letters(23, e, r),
        "extra_msa_mask": ones(e, r),
        "extra_has_deletion": normal(e, r).sign().clamp(min=0),
        "extra_deletion_value": normal(e, r),
    }
    if templates:
        features |= {
            "template_aatype": letters(22, t, r),
            "template_all_atom_positions": 10 * normal(t, r, 37, 3),
            "template_all_atom_masks": ones(t, r, 37),
            "template_pseudo_beta": 10 * normal(t, r, 3),
            "template_pseudo_beta_mask": ones(t, r),
            "template_mask": ones(t),
        }
    return features


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights of variance 1 / inputs, biases of 0.1, scales of norms about 1: AF2's initialisation silences branches."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        parameter.mul_(parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 0.1)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.add_(1)


def output_tensors(output: ModelOutput) -> list[Tensor]:
    """Every tensor that a loss or the next pass may read."""
    structure = output.structure
    own = [value for value in vars(output).values() if isinstance(value, Tensor)]
    return [
        *own,
        structure.angles,
        structure.unnormalized_angles,
        structure.atom14,
        structure.backbone.to_flat12(),
        structure.frames.to_flat12(),
    ]
