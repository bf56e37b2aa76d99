"""Violations of stereochemistry: bonds and angles between residues, clashes, distances within residues (supplement
1.9.11).

AF2 fine-tunes with this loss. Positions are in Å. Structures are whole on every rank; each rank compares its share of the
atoms with all and multiplies its result by the number of ranks, so that the MEAN over ranks is the loss.

Clashes (equation 46) are overlaps of van der Waals spheres. All pairs of atoms are compared, a few rows at a time, forward
and once more backward: memory is linear in the number of atoms, and no size depends on data, so the host never waits. Each
pair belongs to the atom that comes first.

Shapes: B batch, R residues, A atoms that exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.geometry.frames import Constant
from evodsp.geometry.residues import (
    ATOM14_DISTS_LOWER_BOUND,
    ATOM14_DISTS_UPPER_BOUND,
    CLASH_TOLERANCE,
    DISTANCE_TOLERANCE,
    RESTYPE_ATOM14_RADIUS,
    RESTYPE_ORDER,
)
from evodsp.losses.structure import rows_at_once, take
from evodsp.parallel.exchange import Exchange, LocalExchange

_N, _CA, _C, _SG = 0, 1, 2, 5  # atom14 slots; SG is cysteine's


@dataclass(frozen=True)
class Atoms:
    """The properties of atoms, besides their positions, that decide which of them clash. Every field is [B, A], in the
    dtype of the positions.
    """

    reach: Float[Tensor, "B A"]
    """Van der Waals radius in Å; minus infinity for an absent atom, which overlaps with nothing."""
    residue: Float[Tensor, "B A"]
    """Number of the atom's residue; atoms of one residue do not clash."""
    carbon: Float[Tensor, "B A"]
    """Number of the residue whose N atom is bonded to a C atom; NaN, which equals nothing, for other atoms."""
    nitrogen: Float[Tensor, "B A"]
    """Number of an N atom's residue; NaN for other atoms."""
    sulphur: Float[Tensor, "B A"]
    """0 for atoms in slot 5, NaN for others. Like AF2, two atoms in slot 5 always count as a disulphide bridge, whatever
    their residues."""

    @classmethod
    def of(
        cls,
        radius: Float[Tensor, "B A"],
        mask: Float[Tensor, "B A"],
        slot: Int[Tensor, "B A"],
        residue_index: Int[Tensor, "B A"],
    ) -> Atoms:
        """`slot`: the atom's atom14 slot; `residue_index`: the number of its residue."""
        residue = residue_index.to(radius.dtype)
        return cls(
            reach=torch.where(mask > 0, radius, -torch.inf),
            residue=residue,
            carbon=torch.where(slot == _C, residue + 1, torch.nan),
            nitrogen=torch.where(slot == _N, residue, torch.nan),
            sulphur=torch.where(slot == _SG, 0.0, torch.nan).to(radius.dtype),
        )


class SummedOverlap(torch.autograd.Function):
    """Each atom's summed overlap with the other atoms, from the pairs whose first atom is one of `rows`."""

    @staticmethod
    def forward(ctx: Any, positions: Float[Tensor, "B 3 A"], atoms: Atoms, rows: slice) -> Float[Tensor, "B A"]:
        total = torch.zeros_like(atoms.reach)
        for here, after, overlap, _, _ in _blocks(positions, atoms, rows):
            # Two atoms of the block's own rows meet twice, once in the row of each; all other pairs meet once.
            total[:, here] += overlap.sum(2)
            total[:, after] += overlap[:, :, here.stop - here.start :].sum(1)
        ctx.save_for_backward(positions)
        ctx.atoms, ctx.rows = atoms, rows
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "B A"]) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        result = torch.zeros_like(positions)
        for here, after, overlap, difference, distance in _blocks(positions, ctx.atoms, ctx.rows):
            columns = slice(here.start, None)
            # An overlap falls as the distance grows, and counts for both atoms.
            slope = overlap.sign_().mul_(grad[:, here, None] + grad[:, None, columns]).div_(distance)
            for axis, along in enumerate(difference):
                pull = along.mul_(slope)
                result[:, axis, here] -= pull.sum(2)
                result[:, axis, after] += pull[:, :, here.stop - here.start :].sum(1)
        return result, None, None


_Block = tuple[slice, slice, Tensor, list[Tensor], Tensor]


def _blocks(positions: Float[Tensor, "B 3 A"], atoms: Atoms, rows: slice) -> Iterator[_Block]:
    """Yields, for a few rows at a time and all columns from the first of these rows on: the rows, the columns after them,
    the overlaps [B, rows, columns], the differences of the three coordinates, and the distances."""
    samples, count = atoms.reach.shape
    at_once = rows_at_once(samples * count, positions.device)
    for start in range(rows.start, rows.stop, at_once):
        here, columns = slice(start, min(start + at_once, rows.stop)), slice(start, count)
        difference = [x[:, here, None] - x[:, None, columns] for x in positions.unbind(1)]
        distance = difference[0].square()
        for along in difference[1:]:
            distance.addcmul_(along, along)
        distance.add_(1e-10).sqrt_()  # 1e-10 keeps the gradient finite where points coincide
        overlap = (
            (atoms.reach[:, here, None] - CLASH_TOLERANCE + atoms.reach[:, None, columns]).sub_(distance).clamp_(min=0)
        )
        for one, other in (
            (atoms.residue, atoms.residue), (atoms.carbon, atoms.nitrogen),
            (atoms.nitrogen, atoms.carbon), (atoms.sulphur, atoms.sulphur),
        ):  # fmt: skip
            overlap.masked_fill_(one[:, here, None] == other[:, None, columns], 0)
        yield here, slice(here.stop, count), overlap, difference, distance


# Ideal values and standard deviations between residues (Engh & Huber): C-N in Å before any residue and before proline.
_C_N, _C_N_DEVIATION = 1.329, 0.014
_C_N_PROLINE, _C_N_PROLINE_DEVIATION = 1.341, 0.016
LONGEST_PEPTIDE_BOND = _C_N_PROLINE + DISTANCE_TOLERANCE * _C_N_PROLINE_DEVIATION
"""1.53 Å: no longer bond is within the tolerance, whichever residue follows."""
_COS_CA_C_N, _COS_CA_C_N_DEVIATION = -0.4473, 0.0311  # 116.6 degrees
_COS_C_N_CA, _COS_C_N_CA_DEVIATION = -0.5203, 0.0353  # 121.4 degrees

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
    complexes it must be unique (`evodsp.losses.structure.unique_residue_numbers`): chains are then not bonded, and their atoms
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
