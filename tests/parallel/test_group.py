"""What a group's methods bring, at sizes that gloo exchanges at once and at those it takes in rounds."""

from __future__ import annotations

import time
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from evodsp.parallel.group import _GATHERED, _SUMMED, Group
from evodsp.selftest.shared_device import HostGroup
from tests.ranks import RankPool

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


def check(handle: Any, carrier: Carrier, size: int, dtype: torch.dtype) -> None:
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

    for maximum, expected in ((False, everyone.sum(0).to(dtype)), (True, everyone.amax(0))):
        total = own.clone().view(1, -1)
        group.all_reduce(total, maximum).wait()
        assert torch.equal(total, expected.view(1, -1))


@pytest.mark.parametrize("carrier", SIZES)
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.verify), 3, pytest.param(4, marks=pytest.mark.verify)]
)
def test_every_method_brings_what_its_name_says(pool: RankPool, ranks: int, carrier: Carrier) -> None:
    """Catches parts in the wrong order, sums of another dtype, maxima that are sums, and sizes of which one path is wrong."""
    for size in SIZES[carrier]:
        for dtype in DTYPES:
            pool.run(ranks, check, carrier, size, dtype)


def sums(handle: Any) -> tuple[bytes, bytes]:
    group = Group(handle)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank)) * 10.0 ** (3 * group.rank)
    total, received = x.clone(), x.new_empty(1000)
    group.all_reduce(total).wait()
    group.reduce_scatter(received, x.repeat(group.size)).wait()
    return total.numpy().tobytes(), received.numpy().tobytes()


def test_sums_have_the_same_bits_on_all_ranks(pool: RankPool) -> None:
    """Catches terms that each rank adds in another order: replicated parts of a model would drift apart."""
    found = pool.run(4, sums)
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
