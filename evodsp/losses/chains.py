"""Chains of a complex in the losses: pairs within and across chains, residue numbers that are unique, and the loss of chains
that are too near to each other (supplement of AlphaFold-Multimer, section 7).

`chain` is the number of each residue's chain, from 1 on; in padding it is 0. No size depends on data, and no number of chains
is assumed. Positions are in Å. Shapes: B batch, R residues.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evodsp.parallel.exchange import Exchange, LocalExchange

_SLACK = 4.0
"""Å by which the distance between two chains may be too small at no cost."""
_SCALE = 20.0
"""Å beyond the slack that give a loss of 1."""


def count_pairs(
    mask: Float[Tensor, "B R"], chain: Int[Tensor, "B R"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """The numbers of ordered pairs of marked residues within chains and across chains, without an array of pairs."""
    # A chain's slot is where its first residue comes in the order of chains: below R, whatever the chain's number.
    slot = torch.searchsorted(chain.sort(-1).values, chain.contiguous())
    counts = torch.zeros_like(mask).scatter_add(-1, slot, mask)
    return counts.square().sum(-1), (counts * (counts.sum(-1, keepdim=True) - counts)).sum(-1)


def unique_residue_numbers(residue_index: Int[Tensor, "B R"], chain: Int[Tensor, "B R"]) -> Int[Tensor, "B R"]:
    """A number for each residue of a complex that no other has; two differ by one if the residues are neighbours in one chain.

    `residue_index` numbers the residues of each chain. The residues of a chain come in their order, without those of others.
    """
    # Small numbers, because what compares them may hold them in float32: chain times a large number would be rounded.
    bonded = (residue_index.diff(dim=1) == 1) & (chain.diff(dim=1) == 0)
    steps = torch.where(bonded, 1, 2)
    return torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)


def chain_centre_loss(
    ca: Float[Tensor, "B R 3"],
    true_ca: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    chain: Int[Tensor, "B R"],
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Mean over ordered pairs of chains of min((d - d_true + 4 Å) / 20 Å, 0)^2; d is the distance between the chains' centres.

    A centre is the mean of the CA atoms that are resolved (`mask`); chains without any do not count. As in Uni-Fold, a chain
    and itself are a pair, of loss 0. The loss keeps apart chains that a model has put into one another (supplement of
    AlphaFold-Multimer, section 7). All arguments are whole on every rank; each rank sums over the pairs of its own residues'
    chains, and the mean over ranks is the loss.
    """
    dtype, rows = torch.promote_types(ca.dtype, torch.float32), exchange.owned(mask.shape[1])
    same = (chain[:, :, None] == chain[:, None]) * mask[:, None].to(dtype)
    residues = same.sum(-1).clamp(min=1)
    # Each residue stands for its part of its chain, so the number of chains need not be known.
    part = mask.to(dtype) / residues

    def distances(positions: Tensor) -> Tensor:
        # Not a matrix product, which may round to TF32.
        sums = [(same * x[:, None]).sum(-1) for x in positions.to(dtype).unbind(-1)]
        centre = torch.stack(sums, -1) / residues[..., None]
        difference = centre[:, rows, None] - centre[:, None]
        return torch.sqrt(1e-10 + difference.square().sum(-1))  # 1e-10 keeps the gradient finite where centres coincide

    missing = ((distances(ca) - distances(true_ca) + _SLACK) / _SCALE).clamp(max=0)
    total = exchange.ranks * (part[:, rows, None] * part[:, None] * missing.square()).sum((1, 2))
    return total / part.sum(-1).square().clamp(min=1)
