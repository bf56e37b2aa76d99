"""The public functions of `evodsp.parallel`, in a transformer whose blocks attend along space and time in turn; and `dropout`,
whose masks are addressed by global position."""

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
from torch.utils.checkpoint import checkpoint

from evodsp.parallel import (
    Group,
    Ledger,
    Mesh,
    average_gradients,
    dropout,
    gather,
    init_mesh,
    split,
    start_gather,
    start_switch,
    switch,
    total,
)
from evodsp.parallel import group as mesh_module
from evodsp.rng import Draws
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


RATE, CHANNELS = 0.3, 3
SIZES = (5, 7)
DRAWS = Draws.root(11).at("attention", 2)


def uniform(key: int, number: int) -> float:
    """Philox4x32-10 in Python's own integers: the first word for this counter, as a multiple of 2^-24."""
    word = (1 << 32) - 1
    counter, keys = [number & word, number >> 32, 0, 0], [key & word, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ keys[0],
            second & word,
            (first >> 32) ^ counter[3] ^ keys[1],
            first & word,
        ]
        keys = [(keys[0] + 0x9E3779B9) & word, (keys[1] + 0xBB67AE85) & word]
    return (counter[0] >> 8) / (1 << 24)


def oracle(positions: Tensor, channels: int = CHANNELS) -> Tensor:
    """Which elements are kept: number channels * position + channel of the stream is not below the rate."""
    kept = [
        [uniform(DRAWS.key, channels * position + channel) >= RATE for channel in range(channels)]
        for position in positions.flatten().tolist()
    ]
    return torch.tensor(kept).view(*positions.shape, channels)


def numbered() -> Tensor:
    return torch.arange(SIZES[0] * SIZES[1]).view(SIZES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_element_of_a_mask(dtype: torch.dtype) -> None:
    """Catches a wrong address, a rate that is the share of kept elements, and kept elements that are not scaled."""
    x = torch.ones(2, *SIZES, CHANNELS, dtype=dtype, requires_grad=True)
    y = dropout(x, RATE, numbered(), DRAWS)
    expected = oracle(numbered()).to(dtype) / (1 - RATE)
    assert y.dtype == dtype
    assert torch.equal(y, expected.expand_as(y))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected.expand_as(y))


def test_positions_beyond_32_bits() -> None:
    """Catches addresses that wrap: in a long video, element 2^32 would be dropped with element 0."""
    positions = torch.tensor([0, 1 << 31, (1 << 40) + 1])
    found = dropout(torch.ones(3, 4, dtype=torch.float64), RATE, positions, DRAWS)
    assert torch.equal(found > 0, oracle(positions, 4))


def test_samples_with_numbers_of_their_own() -> None:
    """Catches a mask that all samples of a batch share although their vectors have different numbers."""
    positions = torch.arange(2 * SIZES[0] * SIZES[1]).view(2, *SIZES)
    found = dropout(torch.ones(2, *SIZES, CHANNELS), RATE, positions, DRAWS) > 0
    assert torch.equal(found, oracle(positions))
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_how_many_elements_are_dropped(rate: float) -> None:
    """Catches numbers that are not uniform, and streams that depend on each other: four standard deviations are allowed."""
    n = 1 << 16
    first, second = (
        dropout(torch.ones(n // 4, 4), rate, torch.arange(n // 4), DRAWS.at(stream)) == 0
        for stream in ("first", "second")
    )
    spread = 4 * (rate * (1 - rate) / n) ** 0.5
    assert abs(first.double().mean() - rate) < spread
    both = rate**2
    assert abs((first & second).double().mean() - both) < 4 * (both * (1 - both) / n) ** 0.5


def test_rates_at_and_beyond_the_ends() -> None:
    """Catches a division by zero, and a copy or a draw where nothing is dropped."""
    x = torch.ones(2, CHANNELS)
    assert dropout(x, 0.0, torch.arange(2), DRAWS) is x
    for rate in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"is not in \[0, 1\)"):
            dropout(x, rate, torch.arange(2), DRAWS)


def on_shards(handle: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    """Masks of this rank's shard along each axis; and in the forward pass and the recomputation of one."""
    x = torch.ones(2, *SIZES, CHANNELS, dtype=torch.float64)
    masks = []
    for axis in (1, 2):
        shard = split(x, axis, handle)
        if axis == 2:
            shard = switch(split(x, 1, handle), 1, 2, SIZES[0], handle)
        masks.append(dropout(shard, RATE, split(numbered(), axis - 1, handle), DRAWS))

    seen: list[Tensor] = []

    def dropped(x: Tensor, positions: Tensor) -> Tensor:
        y = dropout(x, RATE, positions, DRAWS)
        seen.append(y.detach())
        return y.square()

    rows = split(x, 1, handle).requires_grad_()
    checkpoint(dropped, rows, split(numbered(), 0, handle), use_reentrant=False).sum().backward()
    forward, again = seen
    return masks, forward, again


def test_the_same_mask_on_every_mesh_and_when_recomputed(pool: RankPool) -> None:
    """Catches masks addressed by local position, or drawn anew when activations are recomputed."""
    expected = (oracle(numbered()).double() / (1 - RATE)).expand(2, *SIZES, CHANNELS)
    for ranks in (1, 2, 3, 4):
        for rank, (masks, forward, again) in enumerate(pool.run(ranks, on_shards)):
            for axis, mask in zip((1, 2), masks, strict=True):
                assert torch.equal(mask, torch.tensor_split(expected, ranks, axis)[rank])
            assert torch.equal(forward, masks[0])
            assert torch.equal(again, forward)
