"""Collectives over real ranks (gloo): their values, their backward passes, early launches and ledger entries."""

from __future__ import annotations

import time
import weakref
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evodsp.parallel.collectives import (
    DIMENSION,
    Axis,
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
from evodsp.parallel.exchange import LocalExchange, ShardedExchange, start
from evodsp.parallel.group import _GATHERED, _SUMMED, Entry, Group, Ledger
from evodsp.selftest.shared_device import HostGroup
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


@pytest.mark.verify_but("*-True")
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_backward_is_the_exact_transpose(pool: RankPool, name: str, ranks: int, fast: bool) -> None:
    """Catches FastFold's bug: a gather whose backward is a slice works on one rank and loses gradients on two. `fast`: in
    random directions instead of the whole Jacobian."""
    assert all(pool.run(ranks, check_gradients, name, fast))


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


def test_shards_are_those_of_tensor_split() -> None:
    """Catches a second rule for uneven shards: neighbouring ranks would exchange the wrong entries."""
    for whole in range(12):
        for ranks in range(1, 8):
            parts = torch.arange(whole).tensor_split(ranks)
            assert shard_sizes(whole, ranks) == tuple(map(len, parts))
            for rank, part in enumerate(parts):
                assert torch.arange(whole)[shard_slice(whole, ranks, rank)].equal(part)


def two_steps(handle: Any) -> tuple[list[tuple[str, str, int]], dict[str, int]]:
    """Two forward and backward passes through a recomputed sum and maximum: all entries, and the bytes of each phase."""
    ledger = Ledger()
    group = Group(handle, ledger)

    def function(x: Tensor) -> Tensor:
        return (maximum(x, group) + start(x[:1], Sum(group)).wait()).square()

    for length in (2, 3):
        x = torch.ones(length, requires_grad=True)
        checkpoint(function, x, use_reentrant=False).sum().backward()
    volumes = {phase: ledger.bytes(phase) for phase in ("forward", "recompute", "backward")}
    return [(e.phase, e.kind, e.elements) for e in ledger.entries], {**volumes, "all": ledger.bytes()}


def test_every_step_has_its_own_forward_recomputation_and_backward(pool: RankPool) -> None:
    """Catches recomputed collectives counted as forward, and a recompute flag that stays set in the next step."""
    for entries, volumes in pool.run(2, two_steps):
        step = {n: [("all-reduce", 2 * n), ("all-reduce", 2)] for n in (2, 3)}
        assert entries == [
            (phase, *call)
            for n in (2, 3)
            for phase, calls in (("forward", step[n]), ("recompute", step[n]), ("backward", step[n][1:]))
            for call in calls
        ]
        assert volumes == {"forward": 56, "recompute": 56, "backward": 16, "all": 128}


RESIDUES, WIDTH = 7, 5  # none of 2, 3 and 4 divides either
PIECES = {
    "all": [slice(0, 5)],
    "unequal": [slice(0, 2), slice(2, 5)],
    "single": [slice(n, n + 1) for n in range(WIDTH)],
}


def pair() -> Tensor:
    """[B, I, J, c], all numbers different."""
    return torch.arange(2.0 * RESIDUES**2 * WIDTH, dtype=torch.float64).view(2, RESIDUES, RESIDUES, WIDTH)


def switched(handle: Any, from_axis: Axis, to_axis: Axis, pieces: str) -> tuple[Tensor, bool, int]:
    """The result, whether it lies in the input's memory, and the bytes that were sent."""
    ledger = Ledger()
    exchange = ShardedExchange(Group(handle, ledger))
    x = exchange.shard(pair(), from_axis).contiguous()
    found = exchange.switch_in_place(x, from_axis, to_axis, RESIDUES, PIECES[pieces])
    return found, found.data_ptr() == x.data_ptr(), sum(entry.bytes for entry in ledger.entries)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("from_axis", "to_axis"), [("i", "j"), ("j", "i")])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_a_switch(pool: RankPool, ranks: int, from_axis: Axis, to_axis: Axis, pieces: str) -> None:
    """Catches channels that are overwritten before they have been sent, and a result in new memory."""
    found = pool.run(ranks, switched, from_axis, to_axis, pieces)
    for rank, (x, in_place, sent) in enumerate(found):
        own = shard_slice(RESIDUES, ranks, rank)
        expected = pair()[(slice(None),) * DIMENSION[to_axis] + (own,)]
        assert torch.equal(x, expected)
        assert in_place
        assert sent == expected.numel() * expected.element_size()  # as many as an ordinary switch


def refused(handle: Any) -> str:
    exchange = ShardedExchange(Group(handle))
    try:
        exchange.switch_in_place(torch.zeros(1, 3, 8, 2), "i", "j", 6, [slice(0, 2)])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_axes_of_different_lengths_are_refused(pool: RankPool) -> None:
    """Catches an MSA representation, whose shards along the two axes are not equally large."""
    assert pool.run(2, refused) == ["axis 2 of (1, 3, 8, 2) is not as long as the sharded one, 6"] * 2


def test_one_device_has_nothing_to_switch() -> None:
    x = pair()
    assert LocalExchange().switch_in_place(x, "i", "j", RESIDUES, PIECES["single"]) is x


Carrier = Literal["gloo", "host copies"]
"""`gloo`: what a run on CPUs uses; asynchronous, as NCCL is. `host copies`: for ranks that share a GPU."""


def group_by(carrier: Carrier, handle: Any) -> Group:
    """A group whose exchanges `carrier` carries. One rank has nobody to exchange with."""
    if carrier == "gloo" or handle.size() == 1:
        return Group(handle)
    return HostGroup(handle)


SIZES: dict[Carrier, tuple[int, ...]] = {
    "gloo": (0, 1, 7, _SUMMED + 1, _GATHERED + 1),
    "host copies": (0, 7, _SUMMED + 1),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int32)


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank holds. Sums of four are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank + 10 * size)
    return torch.randint(-50, 50, (size,), generator=generator).to(dtype)


def check_methods(handle: Any, carrier: Carrier, size: int, dtype: torch.dtype) -> None:
    """Compare all methods with what the ranks' values make it."""
    group = group_by(carrier, handle)
    everyone = torch.stack([values(rank, size, dtype) for rank in range(group.size)])
    own = everyone[group.rank]

    # Rank r sends `size` + r + 1 numbers to each: the parts are not alike.
    sent = torch.cat([own.new_full((size + group.rank + 1,), group.rank + place) for place in range(group.size)])
    arriving, leaving = [size + rank + 1 for rank in range(group.size)], [size + group.rank + 1] * group.size
    received = own.new_full((sum(arriving),), 99)
    group.all_to_all(received, sent, arriving, leaving).wait()
    expected = torch.cat([own.new_full((size + rank + 1,), rank + group.rank) for rank in range(group.size)])
    assert torch.equal(received, expected)

    gathered = own.new_full((group.size * size,), 99)
    group.all_gather(gathered, own).wait()
    assert torch.equal(gathered, everyone.flatten())

    sent = torch.stack([own + place for place in range(group.size)])  # another sum for each rank
    received = own.new_full((size,), 99)
    group.reduce_scatter(received, sent.view(-1)).wait()
    assert torch.equal(received, (everyone + group.rank).sum(0).to(dtype))

    for largest, expected in ((False, everyone.sum(0).to(dtype)), (True, everyone.amax(0))):
        total = own.clone().view(1, -1)
        group.all_reduce(total, largest).wait()
        assert torch.equal(total, expected.view(1, -1))


@pytest.mark.parametrize("carrier", SIZES)
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.verify), 3, pytest.param(4, marks=pytest.mark.verify)]
)
def test_every_method_brings_what_its_name_says(pool: RankPool, ranks: int, carrier: Carrier) -> None:
    """Catches parts in the wrong order, sums of another dtype, maxima that are sums, and sizes of which one path is wrong."""
    for size in SIZES[carrier]:
        for dtype in DTYPES:
            pool.run(ranks, check_methods, carrier, size, dtype)


def sums_of(handle: Any) -> tuple[bytes, bytes]:
    group = Group(handle)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank)) * 10.0 ** (3 * group.rank)
    total, received = x.clone(), x.new_empty(1000)
    group.all_reduce(total).wait()
    group.reduce_scatter(received, x.repeat(group.size)).wait()
    return total.numpy().tobytes(), received.numpy().tobytes()


def test_sums_have_the_same_bits_on_all_ranks(pool: RankPool) -> None:
    """Catches terms that each rank adds in another order: replicated parts of a model would drift apart."""
    found = pool.run(4, sums_of)
    assert {bits for rank in found for bits in rank} == {found[0][0]}


def early(handle: Any) -> None:
    """Two sums and an exchange that no buffer holds under way, the later ones awaited first, while ranks are apart in time."""
    group = Group(handle)
    time.sleep(0.05 * group.rank)
    one, two = torch.ones(5), torch.full((5,), 2.0)
    many, counts = torch.arange(3e6 * group.size), [3_000_000] * group.size
    received = torch.empty_like(many)
    first, large, second = (
        group.all_reduce(one),
        group.all_to_all(received, many, counts, counts),
        group.all_reduce(two),
    )
    second.wait()
    first.wait()
    large.wait()
    assert (one == group.size).all()
    assert (two == 2 * group.size).all()
    assert torch.equal(received, many.split(counts)[group.rank].repeat(group.size))


def test_sums_under_way_do_not_mix(pool: RankPool) -> None:
    """Catches results that depend on the order in which they are awaited, and messages that are cut or mixed."""
    pool.run(3, early)
