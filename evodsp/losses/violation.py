"""Violations of stereochemistry: bonds and angles between residues, clashes, distances within residues (supplement 1.9.11).

AF2 fine-tunes with this loss. Positions in Å. Only a few of all pairs of atoms clash: the search for them goes through a few
residues at a time without a graph, and only the pairs found are differentiated, so no array of all pairs of atoms is held.
Structures are whole on every rank; each rank searches its own residues against all, and multiplies what it finds by the number
of ranks, so that the MEAN over ranks is the loss. Shapes: B batch, R residues, P clashing pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from evodsp.geometry.alphabet import RESTYPE_ORDER
from evodsp.geometry.residues import (
    ATOM14_DISTS_LOWER_BOUND,
    ATOM14_DISTS_UPPER_BOUND,
    CLASH_TOLERANCE,
    DISTANCE_TOLERANCE,
    RESTYPE_ATOM14_RADIUS,
)
from evodsp.parallel.exchange import Exchange, LocalExchange

# Ideal values and standard deviations between residues (Engh & Huber): C-N in Å before any residue and before proline.
_C_N, _C_N_DEVIATION = 1.329, 0.014
_C_N_PROLINE, _C_N_PROLINE_DEVIATION = 1.341, 0.016
_COS_CA_C_N, _COS_CA_C_N_DEVIATION = -0.4473, 0.0311  # 116.6 degrees
_COS_C_N_CA, _COS_C_N_CA_DEVIATION = -0.5203, 0.0353  # 121.4 degrees

_N, _CA, _C, _SG = 0, 1, 2, 5  # atom14 slots; SG is cysteine's
_PAIRS_AT_ONCE = 1 << 22  # atom pairs that the search for clashes holds in memory at a time
_SLACK = 1e-3  # Å by which the search may misjudge a distance


@dataclass(frozen=True)
class Violations:
    """The violations of a structure, differentiable, in Å (angles: in units of cosine)."""

    bond_loss: Float[Tensor, " B"]
    """Mean over peptide bonds of the C-N length's deviation beyond its tolerance."""
    angle_ca_c_n_loss: Float[Tensor, " B"]
    """The same for the cosine of the angle CA-C-N."""
    angle_c_n_ca_loss: Float[Tensor, " B"]
    """The same for the cosine of the angle C-N-CA."""
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
) -> Violations:
    """All violations of a predicted structure.

    `mask` marks the atoms that the residues have (`atom14_atom_exists`, zero in padding), observed or not: the loss depends on
    the prediction alone. Residues are neighbours if their `residue_index` differs by one. Computed in float32 or wider.
    """
    dtype = torch.promote_types(atom14.dtype, torch.float32)
    atom14, mask = atom14.to(dtype), mask.to(dtype)
    bonds, cos_ca_c_n, cos_c_n_ca = _connections(atom14, mask, residue_index, aatype)
    return Violations(
        bond_loss=bonds,
        angle_ca_c_n_loss=cos_ca_c_n,
        angle_c_n_ca_loss=cos_c_n_ca,
        clash_atom_loss=_clashes(atom14, mask, residue_index, aatype, exchange),
        within_atom_loss=_within_residues(atom14, mask, aatype),
    )


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
) -> list[Float[Tensor, " B"]]:
    """Mean losses of peptide bonds: of the length, of the angle CA-C-N and of the angle C-N-CA."""
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

    means = []
    for value, wanted, tolerated, present in (
        (length, ideal, deviation, has_bond),
        ((to_ca * to_n).sum(-1), _COS_CA_C_N, _COS_CA_C_N_DEVIATION, has_ca * has_bond),
        ((-to_n * onward).sum(-1), _COS_C_N_CA, _COS_C_N_CA_DEVIATION, has_bond * has_next_ca),
    ):
        error = torch.sqrt(1e-6 + (value - wanted).square())
        loss = (error - DISTANCE_TOLERANCE * tolerated).relu()
        means.append((loss * present).sum(-1) / (present.sum(-1) + 1e-6))
    return means


def _within_residues(
    atom14: Float[Tensor, "B R 14 3"], mask: Float[Tensor, "B R 14"], aatype: Int[Tensor, "B R"]
) -> Float[Tensor, "B R 14"]:
    """Loss of each atom by its distances to the other atoms of its residue."""
    lower, upper = (_look_up(table, aatype, atom14) for table in (ATOM14_DISTS_LOWER_BOUND, ATOM14_DISTS_UPPER_BOUND))
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
) -> Float[Tensor, "B R 14"]:
    """Summed overlap of each atom with atoms of other residues, over this rank's pairs times the number of ranks."""
    samples, residues = aatype.shape
    radius = _look_up(RESTYPE_ATOM14_RADIUS, aatype, atom14)
    sample, one, other = _close_pairs(atom14, mask, residue_index, radius, exchange.owned(residues))
    positions, radius, weight = atom14.flatten(1, 2), radius.flatten(1), mask.flatten(1)
    distance = _length(positions[sample, one] - positions[sample, other], 1e-10)
    bound = radius[sample, one] + radius[sample, other] - CLASH_TOLERANCE
    overlap = exchange.ranks * (bound - distance).relu() * weight[sample, one] * weight[sample, other]

    ends = torch.cat([sample * residues * 14 + one, sample * residues * 14 + other])
    per_atom = overlap.new_zeros(samples * residues * 14).index_add(0, ends, overlap.repeat(2))
    return per_atom.view_as(mask)


@torch.no_grad()
def _close_pairs(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    radius: Float[Tensor, "B R 14"],
    rows: slice,
) -> tuple[Int64[Tensor, " P"], Int64[Tensor, " P"], Int64[Tensor, " P"]]:
    """Sample and the two atoms (of R * 14) of each pair that may clash: near, not bonded, the first atom's residue earlier.

    The first atom's residue is one of `rows`. AF2 takes every two atoms in slot 5 for a disulphide bridge, whatever their
    residues; so does this.
    """
    samples, residues = residue_index.shape
    at_once = max(1, _PAIRS_AT_ONCE // max(1, samples * residues * 14 * 14))
    # An absent atom has no radius: its distances are never below the bound.
    reach = torch.where(mask > 0, radius, -torch.inf).flatten(1)
    positions = atom14.flatten(1, 2)
    found = []
    for start in range(rows.start, rows.stop, at_once):
        here = slice(start * 14, min(start + at_once, rows.stop) * 14)
        distance = torch.cdist(positions[:, here], positions, compute_mode="donot_use_mm_for_euclid_dist")
        bound = reach[:, here, None] + reach[:, None] - (CLASH_TOLERANCE - _SLACK)
        sample, one, other = (distance < bound).nonzero(as_tuple=True)
        one = one + start * 14
        step = residue_index[sample, other // 14] - residue_index[sample, one // 14]
        bonded = (step == 1) & (one % 14 == _C) & (other % 14 == _N)
        bridge = (one % 14 == _SG) & (other % 14 == _SG)
        kept = (step > 0) & ~bonded & ~bridge
        found.append((sample[kept], one[kept], other[kept]))
    sample, one, other = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sample, one, other


def _look_up(table: object, aatype: Int[Tensor, "B R"], like: Tensor) -> Float[Tensor, "B R ..."]:
    """Rows of a constant table for each residue, of the dtype and on the device of `like`."""
    return torch.as_tensor(table, dtype=like.dtype, device=like.device)[aatype.long()]


def _length(vector: Float[Tensor, "*b 3"], eps: float) -> Float[Tensor, "*b"]:
    """Length of a vector; `eps` keeps its gradient finite where points coincide."""
    return torch.sqrt(eps + vector.square().sum(-1))
