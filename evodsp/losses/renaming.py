"""Renaming of symmetric ground-truth atoms (algorithm 26).

A turn of 180 degrees about the last torsion of aspartate, glutamate, phenylalanine or tyrosine only swaps the names of
atoms. The losses compare the prediction with the naming that is nearer to it. Positions are in Å. Shapes: B batch, R
residues, n residues that may have ambiguous atoms, k of them, A atoms, a of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import RENAMING_MATRICES
from evodsp.losses.pairs import rows_at_once, take
from evodsp.parallel.exchange import Exchange, LocalExchange

_SWAPPED = (RENAMING_MATRICES.diagonal(axis1=1, axis2=2) == 0).any(0).nonzero()[0]
_SLOTS = slice(int(_SWAPPED.min()), int(_SWAPPED.max()) + 1)
"""The four consecutive atom14 slots whose names swap in some residue."""


@dataclass(frozen=True)
class RenamedTruth:
    """The ground truth under the naming that is nearer to the prediction."""

    alternative: Float[Tensor, "B R"]
    """1 where the alternative naming is nearer and was chosen."""
    atom14: Float[Tensor, "B R 14 3"]
    """Atom positions."""
    atom14_mask: Float[Tensor, "B R 14"]
    """1 for observed atoms."""
    frames: Rigid
    """Rigid-group frames [B, R, 8]."""


def compute_renamed_ground_truth(
    labels: dict[str, Tensor], atom14: Float[Tensor, "B R 14 3"], exchange: Exchange = LocalExchange()
) -> RenamedTruth:
    """The ground truth with each residue's symmetric atoms named as in the prediction `atom14`.

    `labels`: arrays of `evodsp.geometry.frames.structure_labels` with a batch axis, and, to save work, the lists
    `ambiguous_residues` and `observed_atoms` of `evodsp.data.samples.dataset.collate`. The result is not differentiated. All
    arguments are whole on every rank. Each rank decides for its share of the residues, and the decisions (at most R
    numbers) are gathered.
    """
    truth, other = labels["atom14_gt_positions"], labels["atom14_alt_gt_positions"]
    exists, other_exists = labels["atom14_gt_exists"], labels["atom14_alt_gt_exists"]
    ambiguous, observed = labels["atom14_atom_is_ambiguous"], labels.get("observed_atoms")
    listed = labels.get("ambiguous_residues")
    if listed is None:
        listed = torch.arange(exists.shape[1], device=exists.device).expand(exists.shape[:2])
    count = listed.shape[1]
    own = listed[:, exchange.owned(count)]
    local = alternative_naming_is_better(atom14, truth, other, exists, ambiguous, own, observed)
    decided = exchange.gather(local, "i", count)
    alternative = decided.new_zeros(exists.shape[:2]).scatter(1, listed, decided)
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
    residues: Int[Tensor, "B k"] | None = None,
    atoms: Int[Tensor, "B a"] | None = None,
) -> Float[Tensor, "B _"]:
    """1 where the alternative naming fits the prediction's distances to unambiguous atoms better, else 0.

    `residues`: residues to decide for; None: all. `truth`, `alternative`: true positions under both namings. `exists`: 1
    for observed atoms. `is_ambiguous`: 1 for atoms whose names swap. `atoms`: a list (of R x 14) with every observed atom;
    None: all of them. Algorithm 26.
    """
    dtype = torch.promote_types(atom14.dtype, torch.float32)
    rows = [take(x[:, :, _SLOTS].to(dtype), residues) for x in (atom14, truth, alternative)]
    # Only distances to unambiguous atoms count, because these have the same true position under both namings.
    columns = [take(x.flatten(1, 2).to(dtype), atoms) for x in (atom14, truth)]
    reference = take((exists * (1 - is_ambiguous)).flatten(1).to(dtype), atoms)[:, :, None]
    counted = take((exists * is_ambiguous)[:, :, _SLOTS].to(dtype), residues)
    at_once = rows_at_once(len(reference) * counted.shape[2] * reference.shape[1], atom14.device)
    parts = []
    for start in range(0, counted.shape[1], at_once):
        here = slice(start, start + at_once)
        predicted, error, other_error = (
            _distances(row[:, here].flatten(1, 2), column)
            for row, column in zip(rows, (columns[0], columns[1], columns[1]), strict=True)
        )
        gain = error.sub_(predicted).abs_().sub_(other_error.sub_(predicted).abs_()) @ reference
        parts.append((gain.view_as(counted[:, here]) * counted[:, here]).sum(-1))
    gains = torch.cat(parts, 1) if parts else counted.sum(-1)
    return (gains > 0).to(truth.dtype)


def _distances(x: Float[Tensor, "B n 3"], y: Float[Tensor, "B a 3"]) -> Float[Tensor, "B n a"]:
    """Distances in Å, computed without a matrix product, in which digits would be lost."""
    difference = x[:, :, None] - y[:, None]
    return difference.square_().sum(-1).sqrt_()
