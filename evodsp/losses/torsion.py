"""Losses of the torsion angles (algorithm 27). Shapes: T iterations, B batch, R residues, n angles (sin, cos)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def torsion_loss(
    angles: Float[Tensor, "T B R n 2"],
    truth: Float[Tensor, "B R n 2"],
    alternative: Float[Tensor, "B R n 2"],
    mask: Float[Tensor, "B R n"],
) -> Float[Tensor, " B"]:
    """Squared distance on the unit circle to the true angle or its alternative, whichever is nearer; mean over T, R and n.

    `alternative` differs from `truth` by pi where the side chain is symmetric. `angles` have unit length. The training loss
    passes the four chi angles only, as AlphaFold2's code does, although the algorithm also lists the backbone torsions.
    """
    error = torch.minimum((angles - truth).square().sum(-1), (angles - alternative).square().sum(-1))
    return (error * mask).sum((0, 2, 3)) / (angles.shape[0] * mask.sum((1, 2)) + 1e-10)


def angle_norm_loss(angles: Float[Tensor, "T B R n 2"], mask: Float[Tensor, "B R"]) -> Float[Tensor, " B"]:
    """Absolute deviation of unnormalised angle vectors from unit length; mean over T, the residues of `mask` and n."""
    # 1e-6 keeps the root differentiable at zero.
    error = ((angles.square().sum(-1) + 1e-6).sqrt() - 1).abs()
    iterations, count = angles.shape[0], angles.shape[3]
    return (error * mask[..., None]).sum((0, 2, 3)) / (iterations * count * mask.sum(1) + 1e-10)
