"""Violations of stereochemistry: bonds and angles between residues, clashes, distances within residues (supplement 1.9.11).

AF2 fine-tunes with this loss and reports the metrics. Positions in Å. Few of all pairs of atoms clash: those that do are
searched for some residues at a time without a graph, and only those found are differentiated, so that no array of all
pairs of atoms is ever held. Structures are whole on every rank; each searches its own residues against all, and counts what
it finds as often as there are ranks. Shapes: B batch, R residues, P clashing pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
_CA_CA, _CA_CA_TOLERANCE = 3.80209737096, 1.5  # Å between the CA atoms of neighbours, trans peptide bond

_N, _CA, _C, _SG = 0, 1, 2, 5  # atom14 slots; SG is cysteine's
_PAIRS_AT_ONCE = 1 << 22  # atom pairs that the search for clashes holds in memory at a time
_SLACK = 1e-3  # Å by which the search may misjudge a distance


@dataclass(frozen=True)
class Violations:
    """What `find_violations` saw. Losses are differentiable, in Å (angles: in units of cosine); masks are 0 or 1.

    On several ranks the clash losses are the mean over ranks of what stands here, and `clash_atom_mask` (so `residue_mask`)
    knows the pairs whose earlier residue is this rank's. All else is the same on every rank.
    """

    bond_loss: Float[Tensor, " B"]
    """Mean over peptide bonds of what the C-N length exceeds its tolerance by."""
    angle_ca_c_n_loss: Float[Tensor, " B"]
    """The same for the cosine of the angle CA-C-N."""
    angle_c_n_ca_loss: Float[Tensor, " B"]
    """The same for the cosine of the angle C-N-CA."""
    connection_loss: Float[Tensor, "B R"]
    """The three of each bond, half to either residue. For display: gaps and unobserved atoms are not masked, as in AF2."""
    connection_mask: Float[Tensor, "B R"]
    """Residues either of whose peptide bonds violates length or angles."""
    clash_loss: Float[Tensor, " B"]
    """Mean overlap over all pairs of atoms of different residues."""
    clash_atom_loss: Float[Tensor, "B R 14"]
    """Sum of each atom's overlaps with atoms of other residues."""
    clash_atom_mask: Float[Tensor, "B R 14"]
    """Atoms that overlap one of another residue."""
    within_atom_loss: Float[Tensor, "B R 14"]
    """Sum over the other atoms of the residue of what the distance misses its bounds by, each pair counted both ways."""
    within_atom_mask: Float[Tensor, "B R 14"]
    """Atoms with a distance outside the bounds."""

    @property
    def residue_mask(self) -> Float[Tensor, "B R"]:
        """Residues with a violation of any kind."""
        return torch.stack([self.connection_mask, self.clash_atom_mask.amax(-1), self.within_atom_mask.amax(-1)]).amax(
            0
        )


def find_violations(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    aatype: Int[Tensor, "B R"],
    exchange: Exchange = LocalExchange(),
) -> Violations:
    """All violations of a predicted structure.

    `mask` marks the atoms that the residues have (`atom14_atom_exists`, zero in padding), observed or not: the loss looks
    at the prediction alone. Residues are neighbours if their `residue_index` differs by one. Computed in float32 or wider.
    """
    dtype = torch.promote_types(atom14.dtype, torch.float32)
    atom14, mask = atom14.to(dtype), mask.to(dtype)
    bonds, cos_ca_c_n, cos_c_n_ca, connection_loss, connection_mask = _connections(atom14, mask, residue_index, aatype)
    clash, clash_atoms, clash_mask = _clashes(atom14, mask, residue_index, aatype, exchange)
    within, within_mask = _within_residues(atom14, mask, aatype)
    return Violations(
        bond_loss=bonds,
        angle_ca_c_n_loss=cos_ca_c_n,
        angle_c_n_ca_loss=cos_c_n_ca,
        connection_loss=connection_loss,
        connection_mask=connection_mask,
        clash_loss=clash,
        clash_atom_loss=clash_atoms,
        clash_atom_mask=clash_mask,
        within_atom_loss=within,
        within_atom_mask=within_mask,
    )


def violation_loss(violations: Violations, mask: Float[Tensor, "B R 14"]) -> Float[Tensor, " B"]:
    """The violation term of the loss: bonds, both angles, and clashes and inner distances per atom of `mask`.

    `mask` is the one that `find_violations` was given. The mean over ranks is the loss.
    """
    x = violations
    per_atom = (x.clash_atom_loss + x.within_atom_loss).sum((1, 2)) / (1e-6 + mask.sum((1, 2)))
    return x.bond_loss + x.angle_ca_c_n_loss + x.angle_c_n_ca_loss + per_atom


@torch.no_grad()
def violation_metrics(
    violations: Violations,
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    seq_mask: Float[Tensor, "B R"],
    exchange: Exchange = LocalExchange(),
) -> dict[str, Float[Tensor, " B"]]:
    """Fractions of residues in violation, under AF2's names.

    `violations_extreme_ca_ca_distance` is the fraction of neighbours whose CA atoms are over 1.5 Å too far apart; the
    others count residues of `seq_mask` with a bad bond, a clash, a bad distance within, or any of these.
    The same on every rank.
    """
    violations = replace(violations, clash_atom_mask=exchange.max(violations.clash_atom_mask))
    has_no_gap = residue_index.diff(dim=1) == 1
    distance = _length(atom14[:, 1:, _CA] - atom14[:, :-1, _CA], 1e-6)
    return {
        "violations_extreme_ca_ca_distance": _mean(
            (distance - _CA_CA > _CA_CA_TOLERANCE).to(distance.dtype), mask[:, :-1, _CA] * mask[:, 1:, _CA] * has_no_gap
        ),
        "violations_between_residue_bond": _mean(violations.connection_mask, seq_mask),
        "violations_between_residue_clash": _mean(violations.clash_atom_mask.amax(-1), seq_mask),
        "violations_within_residue": _mean(violations.within_atom_mask.amax(-1), seq_mask),
        "violations_per_residue": _mean(violations.residue_mask, seq_mask),
    }


def _connections(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    aatype: Int[Tensor, "B R"],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Peptide bonds: mean losses of length and the two angles [B], loss and violation of each residue [B, R]."""
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

    means, losses, violated = [], [], []
    for value, wanted, tolerated, present in (
        (length, ideal, deviation, has_bond),
        ((to_ca * to_n).sum(-1), _COS_CA_C_N, _COS_CA_C_N_DEVIATION, has_ca * has_bond),
        ((-to_n * onward).sum(-1), _COS_C_N_CA, _COS_C_N_CA_DEVIATION, has_bond * has_next_ca),
    ):
        error = torch.sqrt(1e-6 + (value - wanted).square())
        loss = (error - DISTANCE_TOLERANCE * tolerated).relu()
        means.append((loss * present).sum(-1) / (present.sum(-1) + 1e-6))
        losses.append(loss)
        violated.append(present * (loss > 0))
    either, loss = torch.stack(violated).amax(0), torch.stack(losses).sum(0)
    loss_of_residue = 0.5 * (_pad(loss, 0, 1) + _pad(loss, 1, 0))
    return means[0], means[1], means[2], loss_of_residue, torch.maximum(_pad(either, 0, 1), _pad(either, 1, 0))


def _within_residues(
    atom14: Float[Tensor, "B R 14 3"], mask: Float[Tensor, "B R 14"], aatype: Int[Tensor, "B R"]
) -> tuple[Float[Tensor, "B R 14"], Float[Tensor, "B R 14"]]:
    """Loss and violation of each atom by its distances to the other atoms of its residue."""
    lower, upper = (_look_up(table, aatype, atom14) for table in (ATOM14_DISTS_LOWER_BOUND, ATOM14_DISTS_UPPER_BOUND))
    pair_mask = mask[..., :, None] * mask[..., None, :] * (1 - torch.eye(14, dtype=mask.dtype, device=mask.device))
    distance = _length(atom14[..., :, None, :] - atom14[..., None, :, :], 1e-10)
    loss = pair_mask * ((lower - distance).relu() + (distance - upper).relu())
    # Sum over both axes: each pair is seen from both of its atoms, twice.
    return loss.sum(-1) + loss.sum(-2), (loss > 0).any(-1).to(mask.dtype)


def _clashes(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    aatype: Int[Tensor, "B R"],
    exchange: Exchange,
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B R 14"], Float[Tensor, "B R 14"]]:
    """Mean overlap of pairs of atoms [B]; summed overlap and presence of one, for each atom (this rank's pairs)."""
    samples, residues = aatype.shape
    radius = _look_up(RESTYPE_ATOM14_RADIUS, aatype, atom14)
    sample, one, other = _close_pairs(atom14, mask, residue_index, radius, exchange.owned(residues))
    positions, radius, weight = atom14.flatten(1, 2), radius.flatten(1), mask.flatten(1)
    distance = _length(positions[sample, one] - positions[sample, other], 1e-10)
    bound = radius[sample, one] + radius[sample, other] - CLASH_TOLERANCE
    overlap = exchange.ranks * (bound - distance).relu() * weight[sample, one] * weight[sample, other]

    ends = torch.cat([sample * residues * 14 + one, sample * residues * 14 + other])
    per_atom = overlap.new_zeros(samples * residues * 14).index_add(0, ends, overlap.repeat(2))
    total = overlap.new_zeros(samples).index_add(0, sample, overlap)
    clashing = (per_atom.detach() > 0).to(mask.dtype)
    mean = total / (1e-6 + _count_pairs(mask, residue_index))
    return mean, per_atom.view_as(mask), clashing.view_as(mask)


@torch.no_grad()
def _close_pairs(
    atom14: Float[Tensor, "B R 14 3"],
    mask: Float[Tensor, "B R 14"],
    residue_index: Int[Tensor, "B R"],
    radius: Float[Tensor, "B R 14"],
    rows: slice,
) -> tuple[Int64[Tensor, " P"], Int64[Tensor, " P"], Int64[Tensor, " P"]]:
    """Sample and atoms (of R * 14) of all pairs that may clash: near, not bonded, the first of the earlier residue.

    That residue is one of `rows`.
    """
    samples, residues = residue_index.shape
    at_once = max(1, _PAIRS_AT_ONCE // max(1, samples * residues * 14 * 14))
    # Absent atoms reach nothing: every bound with one of them is negative.
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


def _count_pairs(mask: Float[Tensor, "B R 14"], residue_index: Int[Tensor, "B R"]) -> Float[Tensor, " B"]:
    """How many pairs of atoms could clash: of different residues, not bonded to one another.

    AF2 takes every pair of atoms in slot 5 for a disulphide bridge, of whatever residues, and so does `_close_pairs`.
    """
    order = residue_index.argsort(dim=1)
    ranked = residue_index.gather(1, order)

    def beyond(x: Tensor, limit: Tensor) -> Tensor:
        """Sum of `x` over residues whose index is above `limit` [B, R]. A running sum, not R x R comparisons."""
        onward = _pad(x.gather(1, order).double().flip(1).cumsum(1).flip(1), 0, 1)
        return onward.gather(1, torch.searchsorted(ranked, limit.contiguous(), right=True))

    atoms, sulphur, carbon, nitrogen = mask.sum(-1), mask[..., _SG], mask[..., _C], mask[..., _N]
    later = atoms * beyond(atoms, residue_index) - sulphur * beyond(sulphur, residue_index)
    bonded = carbon * (beyond(nitrogen, residue_index) - beyond(nitrogen, residue_index + 1))
    return (later - bonded).sum(1).to(mask.dtype)


def _look_up(table: object, aatype: Int[Tensor, "B R"], like: Tensor) -> Float[Tensor, "B R ..."]:
    """Rows of a constant table for each residue, of the dtype and on the device of `like`."""
    return torch.as_tensor(table, dtype=like.dtype, device=like.device)[aatype.long()]


def _length(vector: Float[Tensor, "*b 3"], eps: float) -> Float[Tensor, "*b"]:
    """`eps` keeps the gradient finite where points coincide."""
    return torch.sqrt(eps + vector.square().sum(-1))


def _pad(x: Float[Tensor, "B n"], before: int, after: int) -> Float[Tensor, "B m"]:
    return torch.nn.functional.pad(x, (before, after))


def _mean(value: Float[Tensor, "B n"], weight: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
    return (value * weight).sum(-1) / (1e-10 + weight.sum(-1))
