"""Clashes between atoms of different residues (supplement 1.9.11, equation 46): overlap of van der Waals spheres, in Å.

All pairs of atoms are compared, a few rows at a time, forward and once more backward: memory is linear in the number of atoms,
and no size depends on data, so the host never waits. Each pair belongs to the atom that comes first, and each rank takes its
share of the first atoms. Shapes: B batch, A atoms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.geometry.residues import CLASH_TOLERANCE
from evodsp.losses.pairs import rows_at_once

_N, _C, _SG = 0, 2, 5  # atom14 slots; SG is cysteine's


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
    """For a C atom, the number of the residue whose N atom is bonded to it; NaN, which equals nothing, for other atoms."""
    nitrogen: Float[Tensor, "B A"]
    """For an N atom, the number of its residue; NaN for other atoms."""
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
