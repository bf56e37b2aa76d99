"""Negative dimensions in `split`, `switch` and `gather`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evodsp.parallel import Mesh, gather, split, switch
from tests.ranks import RankPool

SHAPE = (2, 5, 7, 3)
TIME, SPACE = 1, 2


def both_ways(handle: Any) -> list[tuple[Tensor, Tensor]]:
    """Each function's results and the gradients, for dimensions counted from the front and from the end."""
    ranks = list(range(torch.distributed.get_world_size(handle)))
    mesh = Mesh(DeviceMesh.from_group([handle, handle], "cpu", [ranks], mesh_dim_names=("data", "sequence")))
    found: list[list[Tensor]] = []
    for shift in (0, -len(SHAPE)):
        whole = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        rows = split(whole, TIME + shift, mesh)
        columns = switch(rows, TIME + shift, SPACE + shift, whole=SHAPE[TIME], mesh=mesh)
        gathered = gather(columns, SPACE + shift, whole=SHAPE[SPACE], mesh=mesh)
        (gathered * torch.arange(gathered.numel()).view(SHAPE)).sum().backward()
        assert whole.grad is not None
        found.append([rows.detach(), columns.detach(), gathered.detach(), whole.grad])
    return list(zip(*found, strict=True))


def test_a_negative_dim_counts_from_the_end(pool: RankPool) -> None:
    """Catches a negative dim that selects another axis, or that is used where only a non-negative one works."""
    for ranks in (2, 3):
        results = pool.run(ranks, both_ways)
        for found in results:
            for front, end in found:
                assert torch.equal(front, end)
        rows, columns, (whole, *_), _ = ([rank_results[n][0] for rank_results in results] for n in range(4))
        assert torch.equal(torch.cat(rows, TIME), whole)
        assert torch.equal(torch.cat(columns, SPACE), whole)
