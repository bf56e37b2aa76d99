"""Violations of stereochemistry: bonds and angles between residues, clashes, distances within residues (supplement 1.9.11).

AF2 fine-tunes with this loss. Positions are in Å. Structures are whole on every rank; each rank compares its share of the
atoms with all (`clashes`) and multiplies its result by the number of ranks, so that the MEAN over ranks is the loss.
Shapes: B batch, R residues, A atoms that exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evodsp.geometry.frames import Constant
from evodsp.geometry.residues import (
    ATOM14_DISTS_LOWER_BOUND,
    ATOM14_DISTS_UPPER_BOUND,
    DISTANCE_TOLERANCE,
    RESTYPE_ATOM14_RADIUS,
    RESTYPE_ORDER,
)
from evodsp.losses.clashes import Atoms, SummedOverlap
from evodsp.losses.pairs import take
from evodsp.parallel.exchange import Exchange, LocalExchange

# Ideal values and standard deviations between residues (Engh & Huber): C-N in Å before any residue and before proline.
_C_N, _C_N_DEVIATION = 1.329, 0.014
_C_N_PROLINE, _C_N_PROLINE_DEVIATION = 1.341, 0.016
LONGEST_PEPTIDE_BOND = _C_N_PROLINE + DISTANCE_TOLERANCE * _C_N_PROLINE_DEVIATION
"""1.53 Å: no longer bond is within the tolerance, whichever residue follows."""
_COS_CA_C_N, _COS_CA_C_N_DEVIATION = -0.4473, 0.0311  # 116.6 degrees
_COS_C_N_CA, _COS_C_N_CA_DEVIATION = -0.5203, 0.0353  # 121.4 degrees

_N, _CA, _C = 0, 1, 2  # atom14 slots
_LOWER, _UPPER, _RADIUS = (
    Constant(table) for table in (ATOM14_DISTS_LOWER_BOUND, ATOM14_DISTS_UPPER_BOUND, RESTYPE_ATOM14_RADIUS)
)


@dataclass(frozen=True)
class Violations:
    """The violations of a structure, differentiable, in Å (angles: in units of cosine)."""

    bond_loss: Float[Tensor, " B"]
    """Mean over peptide bonds of the C-N length's deviation beyond its tolerance."""
    angle_ca_c_n_loss: Float[Tensor, " B"]
    """Mean over peptide bonds of the deviation of the cosine of the angle CA-C-N beyond its tolerance."""
    angle_c_n_ca_loss: Float[Tensor, " B"]
    """Mean over peptide bonds of the deviation of the cosine of the angle C-N-CA beyond its tolerance."""
    clash_atom_loss: Float[Tensor, "B R 14"]
    """Sum of each atom's overlaps with atoms of other residues. On several ranks, the mean over ranks is this sum."""
    within_atom_loss: Float[Tensor, "B R 14"]
    """Sum over the residue's other atoms of the distance's deviation beyond its bounds, each pair counted both ways."""


def find_violations(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    aatype: Int[Tensor, "B R"],
    exchange: Exchange = LocalExchange(),
    existing: Int[Tensor, "B A"] | None = None,
) -> Violations:
    """All violations of a predicted structure.

    `mask` marks the atoms that the residues have (`atom14_atom_exists`, zero in padding), observed or not: the loss depends
    on the prediction alone. Residues are neighbours if their `residue_index` differs by one, and the same if it is equal. In
    complexes it must be unique (`evodsp.losses.chains.unique_residue_numbers`): chains are then not bonded, and their atoms
    can clash. (In AlphaFold-Multimer's code those of residues with equal numbers in their chains never clash.) `existing`
    lists the atoms (of R x 14) that `mask` marks, so that no others are compared; None compares all. The computation is in
    float32 or wider.
    """
    dtype = torch.promote_types(atom14.dtype, torch.float32)
    atom14, mask = atom14.to(dtype), mask.to(dtype)
    bonds, cos_ca_c_n, cos_c_n_ca = (
        error.sum(-1) / (present.sum(-1) + 1e-6) for error, present in _connections(atom14, mask, residue_index, aatype)
    )
    return Violations(
        bond_loss=bonds,
        angle_ca_c_n_loss=cos_ca_c_n,
        angle_c_n_ca_loss=cos_c_n_ca,
        clash_atom_loss=_clashes(atom14, mask, residue_index, aatype, exchange, existing),
        within_atom_loss=_within_residues(atom14, mask, aatype),
    )


@torch.no_grad()
def violating_residues(
    atom14: Float[Tensor, "R 14 3"],
    mask: Float[Tensor, "R 14"],
    residue_index: Int[Tensor, " R"],
    aatype: Int[Tensor, " R"],
) -> dict[str, Bool[Tensor, " R"]]:
    """The residues of a structure with a violation, by its kind: bond (a peptide bond's length or angles), clash, within.

    A violation is a deviation that adds to the loss, beyond the same tolerances. Both residues of a bond count.
    """
    one = atom14[None].double(), mask[None].double(), residue_index[None], aatype[None]
    broken = torch.stack([error[0] > 0 for error, _ in _connections(*one)]).any(0)
    of_bond = torch.cat([broken, broken.new_zeros(1)]) | torch.cat([broken.new_zeros(1), broken])
    found = find_violations(*one)
    return {
        "bond": of_bond,
        "clash": (found.clash_atom_loss[0] > 0).any(-1),
        "within": (found.within_atom_loss[0] > 0).any(-1),
    }


def violation_loss(violations: Violations, mask: Float[Tensor, "B R 14"]) -> Float[Tensor, " B"]:
    """The violation term of the loss: bonds, both angles, and the mean over atoms of clashes and distances within residues.

    `mask`: as for `find_violations`. The mean over ranks is the loss.
    """
    x = violations
    per_atom = (x.clash_atom_loss + x.within_atom_loss).sum((1, 2)) / (1e-6 + mask.sum((1, 2)))
    return x.bond_loss + x.angle_ca_c_n_loss + x.angle_c_n_ca_loss + per_atom


def _connections(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    aatype: Int[Tensor, "B R"],
) -> list[tuple[Float[Tensor, "B bonds"], Float[Tensor, "B bonds"]]]:
    """Losses of the length, of the angle CA-C-N and of the angle C-N-CA of each peptide bond, and the masks of existing
    ones.
    """
    ca, c = atom14[:, :-1, _CA], atom14[:, :-1, _C]
    n, next_ca = atom14[:, 1:, _N], atom14[:, 1:, _CA]
    has_ca, has_c, has_n, has_next_ca = mask[:, :-1, _CA], mask[:, :-1, _C], mask[:, 1:, _N], mask[:, 1:, _CA]
    has_bond = has_c * has_n * (residue_index.diff(dim=1) == 1)

    length = _length(n - c, 1e-6)
    to_ca, to_n, onward = (ca - c) / _length(ca - c, 1e-6)[..., None], (n - c) / length[..., None], next_ca - n
    onward = onward / _length(onward, 1e-6)[..., None]
    before_proline = aatype[:, 1:] == RESTYPE_ORDER["P"]
    ideal = torch.where(before_proline, _C_N_PROLINE, _C_N)
    deviation = torch.where(before_proline, _C_N_PROLINE_DEVIATION, _C_N_DEVIATION)

    found = []
    for value, wanted, tolerated, present in (
        (length, ideal, deviation, has_bond),
        ((to_ca * to_n).sum(-1), _COS_CA_C_N, _COS_CA_C_N_DEVIATION, has_ca * has_bond),
        ((-to_n * onward).sum(-1), _COS_C_N_CA, _COS_C_N_CA_DEVIATION, has_bond * has_next_ca),
    ):
        error = torch.sqrt(1e-6 + (value - wanted).square())
        loss = (error - DISTANCE_TOLERANCE * tolerated).relu()
        found.append((loss * present, present))
    return found


def _within_residues(
    atom14: Float[Tensor, "B R 14 3"], mask: Float[Tensor, "B R 14"], aatype: Int[Tensor, "B R"]
) -> Float[Tensor, "B R 14"]:
    """Loss of each atom by its distances to the other atoms of its residue."""
    lower, upper = (table.per_residue(aatype, atom14) for table in (_LOWER, _UPPER))
    pair_mask = mask[..., :, None] * mask[..., None, :] * (1 - torch.eye(14, dtype=mask.dtype, device=mask.device))
    distance = _length(atom14[..., :, None, :] - atom14[..., None, :, :], 1e-10)
    loss = pair_mask * ((lower - distance).relu() + (distance - upper).relu())
    return loss.sum(-1) + loss.sum(-2)  # AF2 sums over both axes of the symmetric matrix: every pair counts twice


def _clashes(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    aatype: Int[Tensor, "B R"],
    exchange: Exchange,
    existing: Int[Tensor, "B A"] | None,
) -> Float[Tensor, "B R 14"]:
    """Summed overlap of each atom with atoms of other residues, over this rank's pairs times the number of ranks."""
    slot = torch.arange(14, device=mask.device).expand(mask.shape)
    numbers = residue_index[..., None].expand(mask.shape)
    per_atom = (_RADIUS.per_residue(aatype, atom14), mask, slot, numbers)
    atoms = Atoms.of(*(take(x.flatten(1), existing) for x in per_atom))
    positions = take(atom14.flatten(1, 2), existing).mT.contiguous()
    overlap = exchange.ranks * SummedOverlap.apply(positions, atoms, exchange.owned(positions.shape[2]))
    if existing is not None:
        overlap = overlap.new_zeros(len(mask), slot[0].numel()).scatter(1, existing, overlap)
    return overlap.view_as(mask)


def _length(vector: Float[Tensor, "*b 3"], eps: float) -> Float[Tensor, "*b"]:
    """Length of a vector; `eps` keeps its gradient finite where points coincide."""
    return torch.sqrt(eps + vector.square().sum(-1))
