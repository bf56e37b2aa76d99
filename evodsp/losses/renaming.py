"""Renaming of symmetric ground-truth atoms (algorithm 26).

Turning an aspartate's, glutamate's, phenylalanine's or tyrosine's last torsion by 180 degrees swaps names and nothing else.
The losses compare with whichever of the two namings the prediction is nearer to. Positions in Å.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.geometry.residues import RENAMING_MATRICES
from evodsp.geometry.rigid import Rigid

# Atom14 slots that some residue type's renaming moves: the only ones whose distances can tell the two namings apart.
_AMBIGUOUS_SLOTS = tuple(int(i) for i in np.flatnonzero((np.eye(14) != RENAMING_MATRICES).any(axis=(0, 2))))


@dataclass(frozen=True)
class RenamedTruth:
    """The ground truth under the naming that is nearer to the prediction."""

    alternative: Float[Tensor, "B R"]
    """1 where the alternative naming was taken."""
    atom14: Float[Tensor, "B R 14 3"]
    """Atom positions."""
    atom14_mask: Float[Tensor, "B R 14"]
    """Which atoms were observed."""
    frames: Rigid
    """Rigid-group frames [B, R, 8]."""


def compute_renamed_ground_truth(labels: dict[str, Tensor], atom14: Float[Tensor, "B R 14 3"]) -> RenamedTruth:
    """The ground truth with each residue's symmetric atoms named as the prediction `atom14` has them.

    `labels`: arrays of `evodsp.geometry.frames.structure_labels` with a batch axis. Not differentiated.
    """
    truth, other = labels["atom14_gt_positions"], labels["atom14_alt_gt_positions"]
    exists, other_exists = labels["atom14_gt_exists"], labels["atom14_alt_gt_exists"]
    alternative = alternative_naming_is_better(atom14, truth, other, exists, labels["atom14_atom_is_ambiguous"])
    chosen = alternative.bool()[..., None, None]
    frames = torch.where(chosen, labels["rigidgroups_alt_gt_frames"], labels["rigidgroups_gt_frames"])
    return RenamedTruth(
        alternative=alternative,
        atom14=torch.where(chosen, other, truth),
        atom14_mask=torch.where(chosen[..., 0], other_exists, exists),
        frames=Rigid.from_flat12(frames),
    )


@torch.no_grad()
def alternative_naming_is_better(
    atom14: Float[Tensor, "B R 14 3"],
    truth: Float[Tensor, "B R 14 3"],
    alternative: Float[Tensor, "B R 14 3"],
    exists: Float[Tensor, "B R 14"],
    is_ambiguous: Float[Tensor, "B R 14"],
) -> Float[Tensor, "B R"]:
    """1 for residues whose alternative naming has the better distances to all unambiguous atoms (algorithm 26).

    `truth` and `alternative` are the true positions under both namings, `exists` marks the observed atoms, `is_ambiguous`
    those that swap.
    """
    slots = list(_AMBIGUOUS_SLOTS)

    def distances(positions: Float[Tensor, "B R 14 3"]) -> Float[Tensor, "B Rs A"]:
        positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
        # Exact differences: the short cut |a|^2 + |b|^2 - 2ab would lose the third decimal.
        return torch.cdist(
            positions[:, :, slots].flatten(1, 2), positions.flatten(1, 2), compute_mode="donot_use_mm_for_euclid_dist"
        )

    predicted = distances(atom14)
    error, other_error = (distances(x).sub_(predicted).abs_() for x in (truth, alternative))
    reference = (exists * (1 - is_ambiguous)).flatten(1)  # [B, R * 14]
    counted = (exists * is_ambiguous)[:, :, slots]
    # One sum of differences, so that residues without ambiguous atoms compare exactly equal.
    gain = (error.sub_(other_error) * reference[:, None]).sum(-1).unflatten(1, counted.shape[1:]) * counted
    return (gain.sum(-1) > 0).to(truth.dtype)
