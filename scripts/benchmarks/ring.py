"""A ring: every rank's tensors come past every rank, by N - 1 sends to one neighbour and receives from the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.group import Group


def ring(group: Group, *tensors: Tensor, backward: bool = False) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yields (rank, its tensors) for every rank of the group, this rank's own first.

    The next rank's tensors travel, in one batch, while the caller computes with these. Shapes must be the same on all ranks.
    `backward`: the ring belongs to a backward pass (for the ledger, in which each tensor's way round the ring is an entry).
    """
    rank, size = group.rank, group.size
    held = tuple(x.contiguous() for x in tensors)
    if group.ledger is not None:
        for x in held:
            group.ledger.add("send-receive", size * x.numel(), x.element_size(), backward)
    for step in range(size):
        arriving, works = held, []
        if step < size - 1:
            arriving = tuple(torch.empty_like(x) for x in held)
            works = _hop(group, held, arriving)
        yield (rank + step) % size, held
        for work in works:
            work.wait()
        held = arriving


def _hop(group: Group, sent: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> list[dist.Work]:
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, group=group.handle, group_peer=before) for x in sent]
        + [dist.P2POp(dist.irecv, x, group=group.handle, group_peer=after) for x in received]
    )
