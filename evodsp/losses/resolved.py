"""Loss of the head that predicts which atoms a high-resolution structure resolves (supplement 1.9.10)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def experimentally_resolved_loss(
    logits: Float[Tensor, "B R 37"],
    observed: Float[Tensor, "B R 37"],
    exists: Float[Tensor, "B R 37"],
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
) -> Float[Tensor, " B"]:
    """Binary cross-entropy of whether each atom was observed, mean over the atoms that the residues have.

    `observed` is `all_atom_mask`, `exists` is `atom37_atom_exists`. The loss is zero for structures whose resolution in Å
    is outside the bounds: atoms missing from a poor map, or from a predicted structure (resolution 0), carry no
    information.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    error = functional.binary_cross_entropy_with_logits(logits, observed.to(logits.dtype), reduction="none")
    loss = (error * exists).sum((1, 2)) / (1e-8 + exists.sum((1, 2)))
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))
