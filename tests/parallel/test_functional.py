"""The public functions of `evodsp.parallel`, in a transformer whose blocks attend along space and time in turn."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evodsp.parallel import (
    Group,
    Ledger,
    Mesh,
    average_gradients,
    gather,
    init_mesh,
    split,
    start_gather,
    start_switch,
    switch,
    total,
)
from evodsp.parallel import group as mesh_module
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


class Log(Ledger):
    """The names of collectives, among other events, in the order in which they are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def add(self, kind: Any, elements: int, element_size: int, transposed: bool = False) -> None:
        self.events.append(f"{kind} back" if transposed else kind)


class Mark(torch.autograd.Function):
    """Notes when a tensor is used in either pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, events: list[str]) -> Tensor:
        ctx.name, ctx.events = name, events
        events.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.events.append(f"{ctx.name} back")
        return gradient, None, None


def launched_early(handle: Any) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Results of both early-launched functions, the gradient, and the order of events."""
    log = Log()
    group = Group(handle, log)
    whole, weight = inputs().requires_grad_(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    rows = split(whole, 1, group)
    switching = start_switch(rows, 1, -2, TIME, group)
    gathering = start_gather(rows, -3, TIME, group)
    between = Mark.apply(weight, "between", log.events)
    everything = Mark.apply(gathering.wait(), "gathered", log.events)
    columns = Mark.apply(switching.wait(), "switched", log.events)
    loss = columns.square().sum() * group.size + everything.cos().sum() + between.sum()
    loss.backward()
    average_gradients([whole], group)
    assert whole.grad is not None
    return columns.detach(), everything.detach(), whole.grad, log.events


def test_switch_and_gather_launched_early(pool: RankPool) -> None:
    """Catches functions that wait before they return, in either pass: they would hide no communication behind computation."""
    whole = inputs()
    for ranks in (2, 3):
        for rank, (columns, everything, gradient, events) in enumerate(pool.run(ranks, launched_early)):
            assert torch.equal(columns, torch.tensor_split(whole, ranks, 2)[rank])
            assert torch.equal(everything, whole)
            torch.testing.assert_close(gradient, 2 * whole - whole.sin(), rtol=0, atol=1e-12)
            assert events == [
                "all-to-all", "all-gather", "between", "gathered", "switched",
                "switched back", "all-to-all back", "gathered back", "reduce-scatter back", "between back",
            ]  # fmt: skip


def totals(handle: Any) -> tuple[Tensor, Tensor]:
    """The sum over ranks, and the gradient of this rank's part when each rank's loss weighs the sum differently."""
    rank = torch.distributed.get_rank(handle)
    x = (inputs() * (1 + rank)).requires_grad_()
    y = total(x, handle)
    (y * (2.0 + rank)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_total_and_its_gradient(pool: RankPool) -> None:
    """Catches a sum whose backward pass is the identity, as in many libraries: other ranks' uses of it would not count."""
    for ranks in (2, 3):
        weights, parts = sum(2 + rank for rank in range(ranks)), sum(1 + rank for rank in range(ranks))
        for found, gradient in pool.run(ranks, totals):
            torch.testing.assert_close(found, parts * inputs(), rtol=0, atol=1e-12)
            torch.testing.assert_close(gradient, torch.full_like(gradient, weights), rtol=0, atol=1e-12)


def mistakes(handle: Any) -> list[str]:
    """What impossible dimensions and meshes are answered with."""
    x, found = torch.zeros(2, TIME, SPACE, 3), []
    square = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    for call in (
        lambda: split(x, 4, handle),
        lambda: gather(x, -5, TIME, handle),
        lambda: switch(x, 1, 7, TIME, handle),
        lambda: switch(x, 1, -3, TIME, handle),
        lambda: split(x, 1, square),
    ):
        with pytest.raises((IndexError, ValueError)) as error:
            call()
        found.append(str(error.value))
    return found


def test_impossible_dimensions_and_meshes(pool: RankPool) -> None:
    """Catches a dimension beyond the last one that silently stands for another, a switch to the dimension it comes from, and a
    mesh of two dimensions of which one is taken."""
    for messages in pool.run(4, mistakes):
        assert messages[0] == "dimension 4 of a tensor of shape [2, 5, 7, 3]; expected -4 to 3"
        assert messages[1].startswith("dimension -5 of a tensor")
        assert messages[2].startswith("dimension 7 of a tensor")
        assert messages[3] == "a switch from dimension 1 to dimension -3 of 4: they are the same"
        assert messages[4].endswith("has 2 dimensions; choose one, for instance mesh['sequence']")


def test_nccl_s_groups_take_one_split_a_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches groups that are made one by one where NCCL is connected already: start-up time then grows with the number of
    groups, each of which is a collective of all ranks.
    """
    calls: list[list[list[int]]] = []
    whole = SimpleNamespace(bound_device_id=torch.device("cuda", 0))

    own = Mock(spec=dist.ProcessGroup)

    def split_group(split_ranks: list[list[int]], timeout: Any) -> Any:
        calls.append(split_ranks)
        return own

    monkeypatch.setattr(mesh_module.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(mesh_module.dist.distributed_c10d, "_get_default_group", lambda: whole)
    monkeypatch.setattr(mesh_module.dist, "split_group", split_group)
    assert mesh_module.own_group(torch.arange(6).view(2, 3)) is own
    assert calls == [[[0, 1, 2], [3, 4, 5]]]
