"""`split`, `switch` and `gather` in another kind of transformer, whose blocks attend along space and time in turn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evodsp.parallel import Mesh, gather, init_mesh, split, switch
from tests.ranks import RankPool

TIME, SPACE = 5, 7


def attend(x: Tensor, dim: int) -> Tensor:
    """Self-attention along `dim` of [batch, time, space, channels]."""
    x = x.movedim(dim, -2)
    return (x + (x @ x.mT).softmax(-1) @ x).movedim(-2, dim)


def inputs() -> Tensor:
    return torch.randn(2, TIME, SPACE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def run_sharded(handle: Any) -> tuple[Tensor, Tensor]:
    """Output and gradient of both attentions, computed on shards by all ranks."""
    ranks = torch.distributed.get_world_size(handle)
    mesh = Mesh(
        DeviceMesh.from_group([handle, handle], "cpu", [list(range(ranks))], mesh_dim_names=("data", "sequence"))
    )
    whole = inputs().requires_grad_()
    x = split(whole, 1, mesh)
    x = attend(x, 2)
    x = switch(x, 1, 2, whole=TIME, mesh=mesh)
    x = attend(x, 1)
    y = gather(x, 2, whole=SPACE, mesh=mesh)
    (y.square().sum() / 2).backward()
    torch.distributed.all_reduce(whole.grad, group=handle)
    return y.detach(), whole.grad / ranks


def test_space_time_attention_spread_over_ranks(pool: RankPool) -> None:
    """Catches functions that another model cannot use in the way the documentation describes."""
    whole = inputs().requires_grad_()
    expected = attend(attend(whole, 2), 1)
    (expected.square().sum() / 2).backward()
    for ranks in (2, 3):
        for found, gradient in pool.run(ranks, run_sharded):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def group_timeouts(handle: Any) -> list[float]:
    """Timeouts of both groups of a mesh over all ranks of the pool, in seconds."""
    mesh = init_mesh(2, timeout=timedelta(seconds=77))
    groups = mesh.sequence_group().handle, mesh.data_group().handle
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_groups_of_a_mesh_give_up_when_they_are_told_to(pool: RankPool) -> None:
    """Catches a timeout that only the default group gets: sequence groups would wait for torch's default timeout."""
    assert pool.run(4, group_timeouts) == [[77.0, 77.0]] * 4
