"""Collectives over real ranks (gloo): their values, their backward passes, early launches and ledger entries."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.collectives import (
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ScatterSum,
    Sum,
    Switch,
    Transfer,
    _packed,
    maximum,
    shard,
    shard_sizes,
    shard_slice,
)
from evodsp.parallel.exchange import ShardedExchange, start
from evodsp.parallel.group import Entry, Group, Ledger
from tests.ranks import RankPool

BATCH, ROWS, COLUMNS, CHANNELS = 2, 5, 7, 3  # all differ; none of 2, 3 and 4 divides all of them
NAMES = (
    "switch",
    "switch_back",
    "to_channels",
    "gather",
    "gather_columns",
    "scatter_sum",
    "sum",
    "broadcast",
    "reduce",
)
ROOT = 1


def collective(name: str, group: Group) -> Collective:
    rows, columns, channels = (shard_sizes(n, group.size) for n in (ROWS, COLUMNS, CHANNELS))
    return {
        "switch": Switch(group, 1, 2, rows, columns),
        "switch_back": Switch(group, 2, 1, columns, rows),
        "to_channels": Switch(group, 2, 3, columns, channels),  # with four ranks the last shard is empty
        "gather": Gather(group, 1, rows),
        "gather_columns": Gather(group, 2, columns),
        "scatter_sum": ScatterSum(group, 2, columns),
        "sum": Sum(group),
        "broadcast": Broadcast(group, ROOT % group.size, 2, columns),
        "reduce": Reduce(group, ROOT % group.size, 2, columns),
    }[name]


def source(name: str) -> int | None:
    """The axis along which the input is sharded; None if every rank holds a whole tensor."""
    return {"switch": 1, "switch_back": 2, "to_channels": 2, "gather": 1, "gather_columns": 2, "broadcast": 2}.get(name)


def target(name: str) -> int | None:
    """The axis along which the result is sharded; None if every rank holds the whole result."""
    return {"switch": 2, "switch_back": 1, "to_channels": 3, "scatter_sum": 2}.get(name)


def inputs(ranks: int) -> Tensor:
    """One tensor for each rank, all different: [rank, batch, row, column, channel]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ranks, BATCH, ROWS, COLUMNS, CHANNELS, dtype=torch.float64, generator=generator)


class Replicated(torch.autograd.Function):
    """A tensor that every rank holds in full, as the input of one program run by all ranks. Gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.handle)
        return gradient, None


class Collected(torch.autograd.Function):
    """All ranks' outputs, flattened and concatenated, as the output of one program run by all ranks."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any) -> Tensor:
        parts: list[Any] = [None] * dist.get_world_size(handle)
        dist.all_gather_object(parts, y.detach().reshape(-1), group=handle)
        before = sum(len(part) for part in parts[: dist.get_rank(handle)])
        ctx.place, ctx.shape = slice(before, before + y.numel()), y.shape
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[ctx.place].view(ctx.shape), None


def check_gradients(handle: Any, name: str, fast: bool) -> bool:
    group = Group(handle)

    def program(everything: Tensor) -> Tensor:
        local = Replicated.apply(everything, handle)[group.rank]
        axis = source(name)
        local = local if axis is None else shard(local, axis, group)
        local = local[:, :, shard_slice(COLUMNS, group.size, ROOT % group.size)] if name == "reduce" else local
        return Collected.apply(start(local, collective(name, group)).wait(), handle)

    x = inputs(group.size).requires_grad_()
    return torch.autograd.gradcheck(program, (x,), check_undefined_grad=False, nondet_tol=0.0, fast_mode=fast)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_backward_is_the_exact_transpose(pool: RankPool, name: str, ranks: int) -> None:
    """Catches FastFold's bug: a gather whose backward is a slice works on one rank and loses gradients on two."""
    assert all(pool.run(ranks, check_gradients, name, True))


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_backward_is_the_exact_transpose_in_every_entry(pool: RankPool, name: str, ranks: int) -> None:
    """Catches the same bugs as the test above, with the whole Jacobian instead of random directions."""
    assert all(pool.run(ranks, check_gradients, name, False))


def run_collective(handle: Any, name: str) -> Tensor:
    group = Group(handle)
    local, axis = inputs(group.size)[group.rank], source(name)
    if axis is not None:
        local = shard(inputs(group.size)[0], axis, group)
    if name == "reduce":
        local = local[:, :, shard_slice(COLUMNS, group.size, ROOT % group.size)]
    return start(local, collective(name, group)).wait()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_values_with_sizes_that_do_not_divide(pool: RankPool, name: str, ranks: int) -> None:
    """Catches uneven shards that are joined in the wrong order, and padding that stays in the result."""
    everything = inputs(ranks)
    whole = everything[0] if source(name) is not None else everything.sum(0)
    at_root = shard_slice(COLUMNS, ranks, ROOT % ranks)
    for rank, found in enumerate(pool.run(ranks, run_collective, name)):
        axis, expected = target(name), whole
        if name in ("broadcast", "reduce"):
            expected = whole[:, :, at_root]
            if name == "reduce" and rank != ROOT % ranks:
                assert not found.any()
                continue
        if axis is not None:
            expected = whole.movedim(axis, 0)[shard_slice(whole.shape[axis], ranks, rank)].movedim(0, axis)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def order_of_events(handle: Any) -> list[str]:
    """Launches of a switch in both passes, among the computations before, during and after it, in the order they happen."""
    group, events = Group(handle), []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            events.append(name)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            events.append(f"{ctx.name} back")
            return gradient, None

    class Watched(Switch):
        def launch(self, x: Tensor, backward: bool = False) -> Any:
            events.append("launch back" if backward else "launch")
            return super().launch(x, backward)

        def transpose(self) -> Switch:
            return Watched(self.group, self.target, self.source, self.target_sizes, self.source_sizes)

    x = shard(inputs(group.size)[0], 1, group).requires_grad_()
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)
    pending = start(
        Mark.apply(x, "before"), Watched(group, 1, 2, shard_sizes(ROWS, group.size), shard_sizes(COLUMNS, group.size))
    )
    between = Mark.apply(other, "between")
    y = Mark.apply(pending.wait(), "after")
    (y.square().sum() + between.sum()).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=0)
    return events


def test_launched_early_in_forward_is_launched_early_in_backward(pool: RankPool) -> None:
    """Catches a backward pass that waits right after the launch: it would overlap with no computation."""
    for events in pool.run(2, order_of_events):
        assert events == [
            "before", "launch", "between", "after",
            "after back", "launch back", "between back", "before back",
        ]  # fmt: skip


def ledger_of(handle: Any) -> list[Entry]:
    ledger = Ledger()
    group = Group(handle, ledger)
    local = shard(inputs(group.size)[0], 1, group).requires_grad_()
    rows = shard_sizes(ROWS, group.size)
    y = start(local, Switch(group, 1, 2, rows, shard_sizes(COLUMNS, group.size))).wait()
    z = start(local, Gather(group, 1, rows)).wait()
    total = start(local[:, :1], Sum(group)).wait()
    maximum(local[:, :1], group)
    (y.sum() + z.sum() + total.sum()).backward()
    return ledger.entries


def test_ledger_counts_both_passes(pool: RankPool) -> None:
    """Catches wrong byte counts.

    An all-gather counts its output, a reduce-scatter and an all-to-all their input, an all-reduce twice its input.
    """
    for rank, entries in enumerate(pool.run(2, ledger_of)):
        rows = (3, 2)[rank]
        row, padded = BATCH * COLUMNS * CHANNELS, 6  # five rows on two ranks travel as three each
        forward = [(e.kind, e.elements) for e in entries if e.phase == "forward"]
        assert forward == [
            ("all-to-all", rows * row),
            ("all-gather", padded * row),
            ("all-reduce", 2 * row),
            ("all-reduce", 2 * row),
        ]
        columns = (4, 3)[rank]
        backward = sorted((e.kind, e.elements) for e in entries if e.phase == "backward")
        assert backward == [
            ("all-reduce", 2 * row),
            ("all-to-all", BATCH * ROWS * columns * CHANNELS),
            ("reduce-scatter", padded * row),
        ]
        assert all(e.bytes == 8 * e.elements for e in entries)


def wait_twice(handle: Any) -> tuple[str, bool]:
    group = Group(handle)
    pending = start(torch.ones(2, requires_grad=True), Sum(group))
    once, again = pending.wait(keep=True), pending.wait()
    try:
        pending.wait()
    except RuntimeError as error:
        return str(error), bool((once == again).all())
    return "", False


def test_a_result_is_given_out_once_unless_asked_for_again(pool: RankPool) -> None:
    """Catches a result that is handed out twice: the transposed collective would be launched twice in the backward pass."""
    for message, equal in pool.run(2, wait_twice):
        assert "called twice" in message
        assert equal


def transfer_alive_before_and_after_wait(handle: Any) -> tuple[bool, bool]:
    """Whether the transfer is alive before and after `wait`."""
    transfers: list[weakref.ref[Transfer]] = []

    class Watched(Sum):
        def launch(self, x: Tensor, backward: bool = False) -> Transfer:
            transfer = super().launch(x, backward)
            transfers.append(weakref.ref(transfer))
            return transfer

    pending = start(torch.ones(2, requires_grad=True), Watched(Group(handle)))
    under_way = transfers[0]() is not None
    pending.wait(keep=True)
    return under_way, transfers[0]() is not None


def test_what_was_sent_goes_when_the_result_has_come(pool: RankPool) -> None:
    """Catches a send buffer kept after the wait: with recomputation, each of 48 blocks would hold the MSA twice."""
    assert pool.run(2, transfer_alive_before_and_after_wait) == [(True, False)] * 2


def wrong_shard(handle: Any) -> str:
    group = Group(handle)
    rows, columns = shard_sizes(ROWS, group.size), shard_sizes(COLUMNS, group.size)
    try:
        start(torch.ones(1, ROWS, COLUMNS, 1), Switch(group, 1, 2, rows, columns))
    except ValueError as error:
        return str(error)
    return ""


def test_a_wrong_shard_is_an_error_on_every_rank(pool: RankPool) -> None:
    """Catches a missing size check: ranks that disagree about sizes would hang."""
    for rank, message in enumerate(pool.run(2, wrong_shard)):
        assert f"axis 1 has 5 entries, expected {(3, 2)[rank]}" in message


def numbers_of_first(handle: Any) -> list[int]:
    exchange = ShardedExchange(Group(handle), dtype=torch.bfloat16)
    return cast(list[int], exchange.of_first(torch.tensor([1001, 7]) + 10 * dist.get_rank(handle)).tolist())


def test_the_first_rank_decides(pool: RankPool) -> None:
    """Catches numbers of another rank, and integers that are rounded on the wire."""
    assert pool.run(3, numbers_of_first) == [[1001, 7]] * 3


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_equal_parts_are_packed_one_after_another(dim: int) -> None:
    """Catches parts in the order of memory: where sizes divide, one copy packs all parts, and other tests have odd sizes."""
    x = torch.arange(1.0, 1 + 4 * 6 * 8).view(4, 8, 6).transpose(1, 2)
    expected = torch.cat([part.flatten() for part in x.split(2, dim)])
    assert torch.equal(_packed(x, dim, [2] * (x.shape[dim] // 2)), expected)
