"""The inputs that a pass of the model takes from the previous one (algorithm 2), and early stopping (as in
AlphaFold-Multimer).

Shape legend: B batch, R residues; j this rank's shard of the pair's columns; on one device all of them.
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
    """The results of a pass that the next one takes as inputs, without gradients. Positions are in Å."""

    first_row: Float[Tensor, "B R c_m"]
    pair: Float[Tensor, "B R j c_z"]
    positions: Float[Tensor, "B R 37 3"]

    @classmethod
    def of(cls, output: ModelOutput) -> Recycled:
        """The recycled results of a pass that was run without gradients."""
        return cls(output.representations["first_row"], output.representations["pair"], output.structure.positions)

    def copied(self) -> Recycled:
        """The same with a pair representation of its own."""
        return dataclasses.replace(self, pair=self.pair.clone())


def with_ca_change(
    output: ModelOutput, former: Recycled, seq_mask: Float[Tensor, "B R"], exchange: Exchange = LocalExchange()
) -> ModelOutput:
    """The output with `ca_change`: the change of its CA-CA distances since the previous pass.

    Every rank gets the same number. Otherwise rounding could make one rank stop while the others wait for it.
    """
    # Residues of unknown type have no CA atom; the position in its slot stays at the origin and must not count.
    mask = seq_mask * output.structure.mask[..., CA]
    change = ca_change(output.structure.positions[..., CA, :], former.positions[..., CA, :], mask)
    return dataclasses.replace(output, ca_change=exchange.max(change))


def ca_change(
    new: Float[Tensor, "B R 3"], old: Float[Tensor, "B R 3"], mask: Float[Tensor, "B R"]
) -> Float[Tensor, " B"]:
    """Root mean square change, in Å, of all CA-CA distances between residues whose `mask` is 1.

    Pairs of a residue with itself count too, as in AlphaFold-Multimer. No superposition is needed. 0 if no residue counts.
    """
    pairs = mask.unsqueeze(-1) * mask.unsqueeze(-2)
    difference = _distances(new) - _distances(old)
    return ((difference.square() * pairs).sum((-1, -2)) / pairs.sum((-1, -2)).clamp(min=1)).sqrt()


def settled(output: ModelOutput, tolerance: float) -> bool:
    """Whether every sample of the batch changed by at most `tolerance` in this pass. It is always False after the first pass.
    A settled pass is the result, as in ColabFold; AlphaFold-Multimer runs one more.
    """
    return output.ca_change is not None and bool((output.ca_change <= tolerance).all())


def _distances(points: Float[Tensor, "B R 3"]) -> Float[Tensor, "B R R"]:
    # The faster mode, which uses a matrix product, has errors above typical tolerances at the size of a protein.
    return torch.cdist(points.float(), points.float(), compute_mode="donot_use_mm_for_euclid_dist")
