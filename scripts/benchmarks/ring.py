"""A ring: every rank's tensors come past every rank, by N - 1 sends to the one neighbour and receives from the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.group import Group


def ring(group: Group, *tensors: Tensor, backward: bool = False) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yields (rank, its tensors) for every rank of the group, this rank's own first.

    The next rank's tensors travel while the caller computes with these. Shapes must be the same on all ranks. `backward`: the
    ring belongs to a backward pass (for the ledger). A hop sends all tensors in one batch and is one entry.
    """
    rank, size = group.rank, group.size
    held = tuple(x.contiguous() for x in tensors)
    for step in range(size):
        arriving, works = held, []
        if step < size - 1:
            arriving = tuple(torch.empty_like(x) for x in held)
            works = _hop(group, held, arriving)
            _record(group, held, backward, times=2 if step == 0 else 1)
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


def _record(group: Group, sent: tuple[Tensor, ...], backward: bool, times: int) -> None:
    """Enter a hop. The first one counts twice: for what it sends and for the part that this rank keeps."""
    if group.ledger is not None:
        elements = sum(x.numel() for x in sent)
        group.ledger.add("send-receive", times * elements, sent[0].element_size(), backward)
