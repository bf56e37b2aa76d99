"""The model's confidence in itself: losses and readings of two heads.

Predicted lDDT-CA (supplement 1.9.6, algorithm 29), and the predicted aligned error with the TM-score that follows from it
(supplement 1.9.7). Shapes: B batch, R residues; i this rank's shard of the rows of the pair, which on one device is all of
them. A rank counts its rows' part of a sum as often as there are ranks: the mean over ranks is the loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from evodsp.geometry.rigid import Rigid
from evodsp.losses.auxiliary import cross_entropy
from evodsp.metrics import lddt_ca
from evodsp.parallel.exchange import Exchange, LocalExchange

MAX_ALIGNED_ERROR = 31.0
"""Å beyond which aligned errors fall in the last bin (supplement 1.9.7)."""


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
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the binned lDDT-CA that the prediction has, mean over residues with an observed CA.

    Positions and resolutions in Å. Zero for structures whose resolution is not within the bounds (predicted and NMR
    structures state 0). The positions get no gradient: the head learns to judge, not to please.
    Everything is whole on every rank; a rank counts its own residues, as often as there are ranks.
    """
    bins, rows = logits.shape[-1], exchange.owned(mask.shape[1])
    scores = lddt_ca(ca.detach().to(true_ca.dtype), true_ca, mask, per_residue=True, rows=rows)
    target = (scores * bins).long().clamp(max=bins - 1)
    total = exchange.ranks * (cross_entropy(logits[:, rows], target) * mask[:, rows]).sum(-1)
    loss = total / (1e-8 + mask.sum(-1))
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))


def pae_loss(
    logits: Float[Tensor, "B i R bins"],
    backbone: Rigid,
    true_backbone: Rigid,
    mask: Float[Tensor, "B R"],
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
    max_error: float = MAX_ALIGNED_ERROR,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the binned aligned error, mean over pairs of residues with an observed backbone.

    The error of (i, j) is the distance in Å of residue j's CA from where it truly is, both seen from the backbone frame of
    residue i. `backbone` and `true_backbone` are [B, R], `mask` is `backbone_affine_mask`. Zero for structures whose
    resolution is not within the bounds. The structure gets no gradient: the head learns to judge, not to please.
    The logits are this rank's rows, which it counts as often as there are ranks; all else is whole.
    """
    rows = exchange.owned(mask.shape[1])
    pair_mask = mask[:, rows, None] * mask[:, None]
    target = aligned_error_bins(backbone, true_backbone, logits.shape[-1], max_error, rows)
    total = exchange.ranks * (cross_entropy(logits, target) * pair_mask).sum((1, 2))
    loss = total / (1e-8 + mask.sum(1).square())
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))


@torch.no_grad()
def aligned_error_bins(
    backbone: Rigid,
    true_backbone: Rigid,
    bins: int,
    max_error: float = MAX_ALIGNED_ERROR,
    rows: slice = slice(None),
) -> Int64[Tensor, "B i R"]:
    """Bin of the aligned error of each frame of `rows` and each CA: `bins` - 1 equally spaced edges from 0 to `max_error`.

    Frames are [B, R]. The first edge is 0: only the diagonal, where there is no error by definition, is in the first bin.
    """

    def seen(frames: Rigid) -> Tensor:
        return frames[:, rows].unsqueeze(-1).apply_inverse(frames.translation[..., None, :, :])

    squared = (seen(backbone) - seen(true_backbone)).square().sum(-1)
    squared.diagonal(offset=rows.start or 0, dim1=-2, dim2=-1).zero_()  # rounding must not decide
    edges = torch.linspace(0, max_error, bins - 1, dtype=squared.dtype, device=squared.device)
    return torch.bucketize(squared, edges.square())


def compute_pae(logits: Float[Tensor, "*b i R bins"], max_error: float = MAX_ALIGNED_ERROR) -> Float[Tensor, "*b i R"]:
    """Expected aligned error of each frame (i) and CA (R), in Å, of whatever rows are given."""
    probabilities, centres = _aligned_error_distribution(logits, max_error)
    return (probabilities * centres).sum(-1)


def highest_pae(bins: int, max_error: float = MAX_ALIGNED_ERROR) -> float:
    """The greatest error in Å that `compute_pae` can state: the last bin's centre."""
    return (bins - 0.5) * max_error / (bins - 2)


@torch.no_grad()
def compute_ptm(
    logits: Float[Tensor, "*b i R bins"],
    mask: Float[Tensor, "*b R"],
    max_error: float = MAX_ALIGNED_ERROR,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, "*b"]:
    """Predicted TM-score, 0 to 1: the expected score in that residue's frame which gives the best (supplement 1.9.7).

    `mask` marks the residues that count, of which there are at least one; padding must be 0. The logits are this rank's rows,
    the mask is whole; every rank gets the score. Not differentiated.
    """
    rows = exchange.owned(mask.shape[-1])
    probabilities, centres = _aligned_error_distribution(logits, max_error)
    mask = mask.to(probabilities.dtype)
    # TM-score's d0 is not defined below 16 residues; AF2 takes shorter chains for 19.
    scale = 1.24 * (mask.sum(-1).clamp(min=19) - 15) ** (1 / 3) - 1.8
    score = 1 / (1 + (centres / scale[..., None]).square())  # [*b, bins]
    expected = (probabilities * score[..., None, None, :]).sum(-1)
    per_frame = (expected * mask[..., None, :]).sum(-1) / (1e-8 + mask.sum(-1, keepdim=True))
    return exchange.max((per_frame * mask[..., rows]).amax(-1))


def _aligned_error_distribution(
    logits: Float[Tensor, "*b i R bins"], max_error: float
) -> tuple[Float[Tensor, "*b i R bins"], Float[Tensor, " bins"]]:
    """Probability of each bin in float32 or wider, and the bins' centres in Å."""
    bins = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    centres = (torch.arange(bins, dtype=logits.dtype, device=logits.device) + 0.5) * (max_error / (bins - 2))
    return logits.softmax(-1), centres
