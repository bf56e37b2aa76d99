"""Losses of the heads: distogram and masked MSA (supplement 1.9.8 and 1.9.9), predicted lDDT-CA and aligned error (1.9.6
and 1.9.7), and which atoms are resolved (1.9.10).

pLDDT, PAE and pTM are computed from the heads' logits in `evodsp.model.heads`.

Shapes: B batch, S sequences, R residues; i and r are this rank's shard of the residues (rows of the pair representation, or
columns of the MSA), which on one device is all R. Each rank sums over its shard and multiplies by the number of ranks, so
that the MEAN over ranks is the loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn import functional

from evodsp.geometry.frames import Rigid
from evodsp.metrics import lddt_ca
from evodsp.model.heads import MAX_ALIGNED_ERROR
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


def experimentally_resolved_loss(
    logits: Float[Tensor, "B R 37"],
    observed: Float[Tensor, "B R 37"],
    exists: Float[Tensor, "B R 37"],
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
) -> Float[Tensor, " B"]:
    """Binary cross-entropy of whether each atom was observed, mean over the atoms that the residues have.

    `observed` is `all_atom_mask`, `exists` is `atom37_atom_exists`. The loss is zero for structures whose resolution in Å
    is outside the bounds: atoms missing from a poor map, or from a predicted structure (resolution 0), carry no
    information.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    error = functional.binary_cross_entropy_with_logits(logits, observed.to(logits.dtype), reduction="none")
    loss = (error * exists).sum((1, 2)) / (1e-8 + exists.sum((1, 2)))
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))
