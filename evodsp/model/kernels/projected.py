"""Queries, keys, values and gates of attention are one projection, so that their gradient is one too and is filled in place.

Shape legend: B batch, N rows (each attends within itself), L positions, Q queries, H heads, D head width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def parts_of(
    projected: Float[Tensor, "B N L 4 H D"], first: int, queries: int
) -> tuple[
    Float[Tensor, "B N Q H D"], Float[Tensor, "B N L H D"], Float[Tensor, "B N L H D"], Float[Tensor, "B N Q H D"]
]:
    """Views: so many queries, from number `first` on; all keys; all values; the gates of these queries."""
    q, k, v, gate = projected.unbind(3)
    attending = slice(first, first + queries)
    return q[:, :, attending], k, v, gate[:, :, attending]


def empty_gradient(projected: Float[Tensor, "B N L 4 H D"], queries: int) -> Float[Tensor, "B N L 4 H D"]:
    """Memory for the gradient of the projection. Where only some positions attend, the others' queries and gates get zero."""
    return torch.empty_like(projected) if queries == projected.shape[2] else torch.zeros_like(projected)
