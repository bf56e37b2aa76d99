"""Predicted lDDT-CA: its loss and its reading (supplement 1.9.6, algorithm 29). Shapes: B batch, R residues."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.losses.auxiliary import cross_entropy
from evodsp.metrics import lddt_ca


def compute_plddt(logits: Float[Tensor, "*b R bins"]) -> Float[Tensor, "*b R"]:
    """Expected lDDT-CA of each residue, 0 to 100: probabilities times the centres of equal bins (algorithm 29)."""
    bins = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    centres = (torch.arange(bins, dtype=logits.dtype, device=logits.device) + 0.5) / bins
    return 100 * (logits.softmax(-1) * centres).sum(-1)


def plddt_loss(
    logits: Float[Tensor, "B R bins"],
    ca: Float[Tensor, "B R 3"],
    true_ca: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    resolution: Float[Tensor, "B"],
    min_resolution: float,
    max_resolution: float,
) -> Float[Tensor, "B"]:
    """Cross-entropy of the binned lDDT-CA that the prediction has, mean over residues with an observed CA.

    Positions and resolutions in Å. Zero for structures whose resolution is not within the bounds (predicted and NMR
    structures state 0). The positions get no gradient: the head learns to judge, not to please.
    """
    bins = logits.shape[-1]
    scores = lddt_ca(ca.detach().to(true_ca.dtype), true_ca, mask, per_residue=True)
    target = (scores * bins).long().clamp(max=bins - 1)
    loss = (cross_entropy(logits, target) * mask).sum(-1) / (1e-8 + mask.sum(-1))
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))
