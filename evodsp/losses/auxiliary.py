"""Losses of the distogram and masked-MSA heads (supplement 1.9.8 and 1.9.9). Shapes: B batch, S sequences, R residues."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn import functional


def distance_bins(
    positions: Float[Tensor, "B R 3"], bins: int, min_distance: float, max_distance: float
) -> Int64[Tensor, "B R R"]:
    """Bin of each distance: `bins` - 1 equally spaced boundaries from `min_distance` to `max_distance` (Å), open ends."""
    edges = torch.linspace(min_distance, max_distance, bins - 1, dtype=positions.dtype, device=positions.device)
    squared = (positions[:, :, None] - positions[:, None]).square().sum(-1)
    return torch.bucketize(squared, edges.square())


def distogram_loss(
    logits: Float[Tensor, "B R R bins"],
    pseudo_beta: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    min_distance: float,
    max_distance: float,
) -> Float[Tensor, "B"]:
    """Cross-entropy of the binned distances between CB atoms (CA for glycine), mean over pairs of observed residues."""
    target = distance_bins(pseudo_beta, logits.shape[-1], min_distance, max_distance)
    pair_mask = mask[:, :, None] * mask[:, None]
    return (cross_entropy(logits, target) * pair_mask).sum((1, 2)) / (1e-6 + pair_mask.sum((1, 2)))


def masked_msa_loss(
    logits: Float[Tensor, "B S R letters"], true_msa: Int[Tensor, "B S R"], bert_mask: Float[Tensor, "B S R"]
) -> Float[Tensor, "B"]:
    """Cross-entropy of the true letters, mean over the positions chosen for masking (`bert_mask`)."""
    return (cross_entropy(logits, true_msa) * bert_mask).sum((1, 2)) / (1e-8 + bert_mask.sum((1, 2)))


def cross_entropy(logits: Float[Tensor, "*b bins"], target: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Negative log-probability of `target`, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = functional.cross_entropy(logits.flatten(0, -2), target.flatten().long(), reduction="none")
    return flat.reshape(target.shape)
