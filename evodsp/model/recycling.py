"""What passes of the model hand on to each other, and when there is no need for another (algorithm 2; AlphaFold-Multimer).

Shape legend: B batch, R residues; j this rank's shard of the pair's columns, on one device all of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.geometry.residues import CA
from evodsp.model.outputs import ModelOutput
from evodsp.parallel.exchange import Exchange, LocalExchange


@dataclass(frozen=True)
class Recycled:
    """What one pass hands to the next, detached. Positions in Å."""

    first_row: Float[Tensor, "B R c_m"]
    pair: Float[Tensor, "B R j c_z"]
    positions: Float[Tensor, "B R 37 3"]

    @classmethod
    def of(cls, output: ModelOutput) -> Recycled:
        """Of a pass that was run without gradients."""
        return cls(output.representations["first_row"], output.representations["pair"], output.structure.positions)


def with_ca_change(
    output: ModelOutput, former: Recycled, seq_mask: Float[Tensor, "B R"], exchange: Exchange = LocalExchange()
) -> ModelOutput:
    """The output, and beside it how far its CA-CA distances are from those of the pass before.

    The same number on every rank of `exchange`: a difference in rounding must not make one stop and the others wait.
    """
    # Residues of unknown type have no CA: theirs stay at the origin, which is no place in the structure.
    mask = seq_mask * output.structure.mask[..., CA]
    change = ca_change(output.structure.positions[..., CA, :], former.positions[..., CA, :], mask)
    return dataclasses.replace(output, ca_change=exchange.max(change))


def ca_change(
    new: Float[Tensor, "B R 3"], old: Float[Tensor, "B R 3"], mask: Float[Tensor, "B R"]
) -> Float[Tensor, " B"]:
    """Root mean square change in Å of all CA-CA distances, over the pairs (a residue with itself too, as AlphaFold-Multimer
    counts them) that `mask` leaves. Superposition does not matter; 0 where no residue is left."""
    pairs = mask.unsqueeze(-1) * mask.unsqueeze(-2)
    difference = _distances(new) - _distances(old)
    return ((difference.square() * pairs).sum((-1, -2)) / pairs.sum((-1, -2)).clamp(min=1)).sqrt()


def settled(output: ModelOutput, tolerance: float) -> bool:
    """Whether no sample of the batch changed by more than `tolerance` in this pass; never after the first one.

    This pass is then the result, as in ColabFold; AlphaFold-Multimer runs one more.
    """
    return output.ca_change is not None and bool((output.ca_change <= tolerance).all())


def _distances(points: Float[Tensor, "B R 3"]) -> Float[Tensor, "B R R"]:
    # The faster mode, by a matrix product, is off by more than a tolerance at the size of a protein.
    return torch.cdist(points.float(), points.float(), compute_mode="donot_use_mm_for_euclid_dist")
