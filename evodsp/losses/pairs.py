"""Common parts of the losses over pairs (frames and atoms, atoms and atoms): the number of rows computed at once, and the
entries to skip.

No size may depend on data on the device, because the host would have to wait for it. Existing entries are therefore listed
on the host (`evodsp.data.samples.dataset.collate`); without such a list all entries are computed, and masks leave out those
that do not exist.
"""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

# Number of pairs computed at once: about a core's cache, or enough to fill a GPU.
CPU_PAIRS = 1 << 17
GPU_PAIRS = 1 << 22


def rows_at_once(pairs_per_row: int, device: torch.device) -> int:
    """Number of rows of pairs to compute at once; memory is linear in the number of rows and columns."""
    return max(1, (CPU_PAIRS if device.type == "cpu" else GPU_PAIRS) // max(1, pairs_per_row))


def take(values: Shaped[Tensor, "B n *c"], listed: Int[Tensor, "B m"] | None) -> Shaped[Tensor, "B _ *c"]:
    """The listed entries of each sample, or all entries without a list. A list must not name an entry twice."""
    if listed is None:
        return values
    return torch.take_along_dim(values, listed.view(*listed.shape, *(1,) * (values.ndim - 2)), 1)
