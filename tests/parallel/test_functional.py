"""The public functions of `evodsp.parallel`, in a transformer whose blocks attend along space and time in turn; and `dropout`,
whose masks are addressed by global position."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evodsp.parallel import (
    Group,
    Ledger,
    Mesh,
    average_gradients,
    dropout,
    functional,
    gather,
    init_mesh,
    parallelize,
    split,
    start_gather,
    start_switch,
    switch,
    total,
)
from evodsp.parallel import group as mesh_module
from evodsp.parallel.testing import check
from evodsp.rng import Draws
from tests.builders.axial import WIDTH, Attention, Layer, built, equal, numbers
from tests.builders.comparison import close
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
    x = split(whole, -3, mesh)
    x = attend(x, 2)
    x = switch(x, -3, 2, whole=TIME, mesh=mesh)
    x = attend(x, 1)
    y = gather(x, -2, whole=SPACE, mesh=mesh)
    (y.square().sum() / 2).backward()
    torch.distributed.all_reduce(whole.grad, group=handle)
    return y.detach(), whole.grad / ranks


def test_space_time_attention_spread_over_ranks(pool: RankPool) -> None:
    """Catches functions that another model cannot use in the way the documentation describes, and negative dimensions that
    select another axis."""
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


def parameter(*shape: int, dtype: torch.dtype = torch.float32, gradient: float | None = None) -> nn.Parameter:
    """A parameter whose gradient has this value plus the number of each element."""
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if gradient is not None:
        made.grad = (gradient + torch.arange(made.numel())).view(shape).to(dtype)
    return made


def mixed(rank: int) -> dict[str, nn.Parameter]:
    """Parameters of several types and shapes; some have no gradient on some ranks."""
    turned = parameter(2, 3)
    turned.grad = (rank + torch.arange(6.0)).view(3, 2).T
    return {
        "every rank": parameter(3, gradient=rank),
        "first rank": parameter(2, 2, gradient=8.0 if rank == 0 else None),
        "no rank": parameter(4),
        "double": parameter(5, dtype=torch.float64, gradient=2.0 * rank),
        "frozen": parameter(2, gradient=rank).requires_grad_(False),
        "bfloat16": parameter(2, dtype=torch.bfloat16, gradient=4.0 * rank),
        "empty": parameter(0, 3, gradient=0.0),
        "scalar": parameter(gradient=rank),
        "turned": turned,
        "double again": parameter(3, dtype=torch.float64, gradient=-rank),
    }


def averaged(handle: Any, bucket: int | None) -> tuple[dict[str, Tensor | None], list[int]]:
    """The gradients after averaging, and the number of elements of each all-reduce."""
    parameters, sizes, reduce = mixed(dist.get_rank(handle)), [], Group.all_reduce

    def counted(group: Group, x: Tensor) -> Any:
        sizes.append(x.numel())
        return reduce(group, x)

    bucketed = mock.patch.object(functional, "BUCKET", bucket if bucket is not None else functional.BUCKET)
    with bucketed, mock.patch.object(Group, "all_reduce", counted):
        average_gradients((p for p in parameters.values()), handle)
        average_gradients([parameters["frozen"]], handle)
    return {name: p.grad for name, p in parameters.items()}, sizes


def test_the_mean_over_ranks(pool: RankPool) -> None:
    """Catches a sum, a parameter that some ranks did not use and that therefore stops the group or counts too much, a gradient
    made up for one that none used, types that are mixed, gradients that are
    not contiguous, frozen parameters' gradients that are averaged, and a group that hangs on an empty list."""
    for ranks, bucket in ((2, None), (3, 4)):
        ordinals = [mixed(rank) for rank in range(ranks)]
        for rank, (found, sizes) in enumerate(pool.run(ranks, averaged, bucket)):
            for name, gradient in found.items():
                if name in ("no rank", "frozen"):
                    continue
                parts = [o[name].grad for o in ordinals]
                total = sum(part.double() for part in parts if part is not None)
                assert gradient is not None
                assert gradient.dtype == ordinals[0][name].dtype
                torch.testing.assert_close(
                    gradient.double(), total / ranks, rtol=1e-2 if name == "bfloat16" else 1e-6, atol=0
                )
            assert found["no rank"] is None
            assert found["frozen"] is not None
            assert torch.equal(found["frozen"], rank + torch.arange(2.0))
            # First which parameters were used. One bucket for each run of parameters of one type, or of four numbers at most.
            assert sizes == [9, 7, 5, 2, 7, 3] if bucket is None else [9, 3, 4, 5, 2, 1, 6, 3]


def over_a_mesh(handle: Any) -> tuple[Tensor | None, Tensor | None]:
    """The mean over all ranks of a mesh, and over its sequence group."""
    mesh = init_mesh(sequence=2)
    both = [parameter(2, gradient=float(dist.get_rank())) for _ in range(2)]
    average_gradients(both[:1], mesh)
    average_gradients(both[1:], mesh.sequence_group())
    return both[0].grad, both[1].grad


def test_a_mesh_names_all_of_its_ranks(pool: RankPool) -> None:
    """Catches samples of other data ranks that are left out: with a mesh, the mean is over sequence and data ranks."""
    for rank, (everywhere, sequence) in enumerate(pool.run(4, over_a_mesh)):
        assert everywhere is not None
        assert torch.equal(everywhere, 1.5 + torch.arange(2.0))
        assert sequence is not None
        assert torch.equal(sequence, (0.5 if rank < 2 else 2.5) + torch.arange(2.0))


DEPTH = 3


def outer_and_inner(handle: Any) -> tuple[Any, Any]:
    """Groups of ranks {0, 2} and {1, 3}, and of {0, 1} and {2, 3}: those that hold this rank."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("outer", "inner"))
    return mesh["outer"], mesh["inner"]


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
