"""Renaming of symmetric ground-truth atoms (algorithm 26).

A turn of 180 degrees about the last torsion of aspartate, glutamate, phenylalanine or tyrosine only swaps the names of atoms.
The losses compare the prediction with the naming that is nearer to it. Positions in Å. Shapes: B batch, R residues, A atoms of
all residues, n ambiguous atoms; r this rank's shard of the residues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.geometry.rigid import Rigid
from evodsp.parallel.exchange import Exchange, LocalExchange


@dataclass(frozen=True)
class RenamedTruth:
    """The ground truth under the naming that is nearer to the prediction."""

    alternative: Float[Tensor, "B R"]
    """1 where the alternative naming is nearer and was chosen."""
    atom14: Float[Tensor, "B R 14 3"]
    """Atom positions."""
    atom14_mask: Float[Tensor, "B R 14"]
    """Which atoms were observed."""
    frames: Rigid
    """Rigid-group frames [B, R, 8]."""


def compute_renamed_ground_truth(
    labels: dict[str, Tensor], atom14: Float[Tensor, "B R 14 3"], exchange: Exchange = LocalExchange()
) -> RenamedTruth:
    """The ground truth with each residue's symmetric atoms named as in the prediction `atom14`.

    `labels`: arrays of `evodsp.geometry.frames.structure_labels` with a batch axis. Not differentiated. All arguments are whole
    on every rank; each rank decides for its own residues (n x A distances), and the decisions (R numbers) are gathered.
    """
    truth, other = labels["atom14_gt_positions"], labels["atom14_alt_gt_positions"]
    exists, other_exists = labels["atom14_gt_exists"], labels["atom14_alt_gt_exists"]
    ambiguous, residues = labels["atom14_atom_is_ambiguous"], exists.shape[1]
    local = alternative_naming_is_better(atom14, truth, other, exists, ambiguous, exchange.owned(residues))
    alternative = exchange.gather(local, "i", residues)
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
    rows: slice = slice(None),
) -> Float[Tensor, "B r"]:
    """1 for each residue of `rows` whose alternative naming fits the prediction's distances to unambiguous atoms better.

    `truth` and `alternative`: the true positions under both namings. `exists`: 1 for observed atoms. `is_ambiguous`: 1 for
    atoms whose names swap. Algorithm 26.
    """
    # A few per cent of all atoms are ambiguous: distances are computed from these only, [n, R * 14].
    chosen = (exists * is_ambiguous)[:, rows]
    sample, row, slot = chosen.nonzero(as_tuple=True)
    residue = row + (rows.start or 0)

    def distances(positions: Float[Tensor, "B R 14 3"]) -> Float[Tensor, "n A"]:
        positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
        vectors = positions.flatten(1, 2)[sample] - positions[sample, residue, slot][:, None]
        return vectors.square_().sum(-1).sqrt_()

    predicted = distances(atom14)
    error, other_error = (distances(x).sub_(predicted).abs_() for x in (truth, alternative))
    reference = (exists * (1 - is_ambiguous)).flatten(1)  # [B, R * 14]
    gain = torch.zeros_like(chosen, dtype=error.dtype)
    gain[sample, row, slot] = (error.sub_(other_error) * reference[sample]).sum(-1)
    return (gain.sum(-1) > 0).to(truth.dtype)
