"""Losses of the two confidence heads: predicted lDDT-CA (supplement 1.9.6) and predicted aligned error (1.9.7).

pLDDT, PAE and pTM are computed from the heads' logits in `evodsp.model.confidence`. Shapes: B batch, R residues; i this rank's
shard of the rows of the pair representation, which on one device is all R of them. Each rank sums over its own rows and
multiplies by the number of ranks, so that the MEAN over ranks is the loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.losses.auxiliary import cross_entropy
from evodsp.metrics import lddt_ca
from evodsp.model.confidence import MAX_ALIGNED_ERROR
from evodsp.parallel.exchange import Exchange, LocalExchange


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
    """Cross-entropy of the bin of the prediction's lDDT-CA, mean over residues with an observed CA.

    Positions and resolutions are in Å. The loss is zero for structures whose resolution is outside the bounds (predicted
    and NMR structures have resolution 0). The positions get no gradient: the head must judge the structure, not change it.
    All arguments are whole on every rank; each rank sums over its own residues.
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
    """Cross-entropy of the bin of the aligned error, mean over pairs of residues with an observed backbone.

    The aligned error of (i, j) is the distance in Å between residue j's predicted and true CA, each seen from residue i's
    backbone frame of the same structure. `backbone` and `true_backbone` are [B, R], `mask` is `backbone_affine_mask`. The
    loss is zero for structures whose resolution is outside the bounds. The structure gets no gradient: the head must judge
    it, not change it. The logits are this rank's rows; all other arguments are whole on every rank.
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
    """Bin of the aligned error of each frame of `rows` and each CA. `bins` - 1 edges divide 0 to `max_error` equally.

    Frames are [B, R]. The first edge is 0, so only the diagonal, whose error is 0 by definition, falls in the first bin.
    """

    def seen(frames: Rigid) -> Tensor:
        return frames[:, rows].unsqueeze(-1).apply_inverse(frames.translation[..., None, :, :])

    squared = (seen(backbone) - seen(true_backbone)).square().sum(-1)
    squared.diagonal(offset=rows.start or 0, dim1=-2, dim2=-1).zero_()  # exactly 0, not up to rounding
    edges = torch.linspace(0, max_error, bins - 1, dtype=squared.dtype, device=squared.device)
    return torch.bucketize(squared, edges.square())
