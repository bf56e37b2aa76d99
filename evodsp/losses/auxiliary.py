"""Losses of the distogram and masked-MSA heads (supplement 1.9.8 and 1.9.9).

Shapes: B batch, S sequences, R residues; i and r are this rank's shard of the residues (rows of the pair representation, or
columns of the MSA), which on one device is all R. Each rank sums over its shard and multiplies by the number of ranks, so that
the MEAN over ranks is the loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn import functional

from evodsp.parallel.exchange import Exchange, LocalExchange


def distance_bins(
    positions: Float[Tensor, "B R 3"], bins: int, min_distance: float, max_distance: float, rows: slice = slice(None)
) -> Int64[Tensor, "B i R"]:
    """Bin of the distance between each residue of `rows` and every residue.

    The `bins` - 1 edges are equally spaced from `min_distance` to `max_distance` (Å); the first and the last bin are open.
    """
    edges = torch.linspace(min_distance, max_distance, bins - 1, dtype=positions.dtype, device=positions.device)
    squared = (positions[:, rows, None] - positions[:, None]).square().sum(-1)
    return torch.bucketize(squared, edges.square())


def distogram_loss(
    logits: Float[Tensor, "B i R bins"],
    pseudo_beta: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    min_distance: float,
    max_distance: float,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the binned distances between CB atoms (CA for glycine), mean over pairs of observed residues.

    Positions and distances are in Å. The logits are this rank's rows; positions and mask are the whole chain's.
    """
    rows = exchange.owned(mask.shape[1])
    target = distance_bins(pseudo_beta, logits.shape[-1], min_distance, max_distance, rows)
    pair_mask = mask[:, rows, None] * mask[:, None]
    total = exchange.ranks * (cross_entropy(logits, target) * pair_mask).sum((1, 2))
    return total / (1e-6 + mask.sum(1).square())


def masked_msa_loss(
    logits: Float[Tensor, "B S r letters"],
    true_msa: Int[Tensor, "B S R"],
    bert_mask: Float[Tensor, "B S R"],
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the true letters, mean over the positions that were masked (`bert_mask`).

    The logits are this rank's residues; letters and mask are the whole MSA's.
    """
    columns = exchange.owned(bert_mask.shape[2])
    error = cross_entropy(logits, true_msa[:, :, columns]) * bert_mask[:, :, columns]
    return exchange.ranks * error.sum((1, 2)) / (1e-8 + bert_mask.sum((1, 2)))


def cross_entropy(logits: Float[Tensor, "*b bins"], target: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Negative log-probability of `target`, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = functional.cross_entropy(logits.flatten(0, -2), target.flatten().long(), reduction="none")
    return flat.reshape(target.shape)
