"""`parallelize` and the functions on several groups at once: meshes of two dimensions, groups within groups, data parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from evodsp.parallel import Group, average_gradients, gather, init_mesh, parallelize, split, switch, total
from evodsp.parallel.testing import check
from tests.builders.axial import WIDTH, Attention, Layer, built, equal, numbers
from tests.builders.comparison import close
from tests.ranks import RankPool

TIME, SPACE, DEPTH = 5, 7, 3


def outer_and_inner(handle: Any) -> tuple[Any, Any]:
    """Groups of ranks {0, 2} and {1, 3}, and of {0, 1} and {2, 3}: those that hold this rank."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("outer", "inner"))
    return mesh["outer"], mesh["inner"]


def attend(x: Tensor, dim: int) -> Tensor:
    """Self-attention along `dim` of [batch, time, space, channels]."""
    x = x.movedim(dim, -2)
    return (x + (x @ x.mT).softmax(-1) @ x).movedim(-2, dim)


def over_two_axes(handle: Any) -> tuple[Tensor, Tensor]:
    """Time over the outer groups, space over the inner ones. Each attention needs its axis whole: the group of that axis
    switches to the other, which is then divided among all four ranks."""
    outer, inner = outer_and_inner(handle)
    whole = numbers(2, TIME, SPACE, WIDTH).requires_grad_()
    x = split(split(whole, 1, outer), 2, inner)
    local = x.shape[1], x.shape[2]
    x = switch(attend(switch(x, 1, 2, TIME, outer), 1), 2, 1, local[1], outer)
    x = switch(attend(switch(x, -2, -3, SPACE, inner), 2), 1, 2, local[0], inner)
    y = gather(gather(x, 2, SPACE, inner), 1, TIME, outer)
    y.square().sum().backward()
    average_gradients([whole], handle)
    assert whole.grad is not None
    return y.detach(), whole.grad


def over_one_axis(handle: Any) -> tuple[Tensor, Tensor]:
    """Time over the outer groups, and each shard of it over the inner ones."""
    outer, inner = outer_and_inner(handle)
    whole = numbers(2, TIME, SPACE, WIDTH).requires_grad_()
    coarse = split(whole, 1, outer)
    x = attend(split(coarse, 1, inner), 2)
    x = switch(switch(x, 1, 2, coarse.shape[1], inner), 1, 2, TIME, outer)
    y = attend(x, 1)
    sums = total(total(y.square().sum(), inner), outer)
    (sums + 0 * y.sum()).backward()
    average_gradients([whole], handle)
    assert whole.grad is not None
    inner_width = split(torch.empty(SPACE), 0, inner).numel()
    return gather(gather(y.detach(), 2, inner_width, outer), 2, SPACE, inner), whole.grad


def test_groups_within_groups(pool: RankPool) -> None:
    """Catches functions that take the default group's ranks, or that undo the sharding of another group."""
    whole = numbers(2, TIME, SPACE, WIDTH).requires_grad_()
    y = attend(attend(whole, 1), 2)
    gradient = torch.autograd.grad(y.square().sum(), whole)[0]
    for found, its_gradient in pool.run(4, over_two_axes):
        close(found, y.detach(), "time over one dimension, space over the other")
        close(its_gradient, gradient, "its gradient")
    y = attend(attend(whole, 2), 1)
    gradient = torch.autograd.grad(y.square().sum(), whole)[0]
    for found, its_gradient in pool.run(4, over_one_axis):
        close(found, y.detach(), "time over both dimensions")
        close(its_gradient, gradient, "its gradient")


AXES = "batch time space depth row channel"


def of_four_axes() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [Layer(time=Attention(1), depth=Attention(3), space=Attention(2), row=Attention(4)) for _ in range(2)]
    return built(nn.Sequential(*layers), (2, TIME, SPACE, DEPTH, 4, WIDTH))


def on_both_dimensions(model: nn.Module, group: Group) -> None:
    """One group switches between time and space, the other one between depth and row."""
    outer, inner = outer_and_inner(group)
    parallelize(model, outer, AXES, {"*.time": "time", "*.space": "space"})
    parallelize(model, inner, AXES, {"*.depth": "depth", "*.row": "row"})


def test_a_model_parallel_on_both_dimensions_of_a_mesh(pool: RankPool) -> None:
    """Catches a second call that takes the first one's shard for the whole tensor, or that switches the first one's axes."""
    check(*of_four_axes(), on_both_dimensions, (4,), run=pool.run)


def of_two_samples() -> tuple[nn.Module, list[Tensor]]:
    model, _ = built(nn.Sequential(Layer(time=Attention(1), space=Attention(2)), nn.Linear(WIDTH, 2)))
    return model, [numbers(2, TIME, SPACE, WIDTH), numbers(2, DEPTH, SPACE, WIDTH)]


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.arange(y.numel()).view(y.shape).cos()).sum()


def in_data_parallel(handle: Any, wrapped: bool) -> dict[str, Tensor]:
    """Gradients of two samples: each is spread over two ranks. The mean is DDP's or that of `average_gradients`."""
    mesh = init_mesh(sequence=2)
    model, samples = of_two_samples()
    parallelize(model, mesh, "batch time space channel", {"0.time": "time", "0.space": "space"}, region="0")
    outer = DistributedDataParallel(model, process_group=handle) if wrapped else model
    loss_of(outer(samples[mesh.data_rank])).backward()
    if not wrapped:
        average_gradients(model.parameters(), mesh)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("wrapped", [True, False])
def test_data_parallel_around_it(pool: RankPool, wrapped: bool) -> None:
    """Catches gradients that are sums over the sequence group, or means over it alone: DDP's mean over all ranks must be the
    mean over samples."""
    model, samples = of_two_samples()
    (sum(loss_of(model(x)) for x in samples) / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in pool.run(4, in_data_parallel, wrapped):
        equal(found, expected, "of two samples")
