"""A switch into the memory of its input, over real ranks (gloo)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.parallel.collectives import DIMENSION, Axis, shard_slice
from evodsp.parallel.exchange import LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, Ledger
from tests.ranks import RankPool

RESIDUES, CHANNELS = 7, 5  # none of 2, 3 and 4 divides either
PIECES = {
    "all": [slice(0, 5)],
    "unequal": [slice(0, 2), slice(2, 5)],
    "single": [slice(n, n + 1) for n in range(CHANNELS)],
}


def pair() -> Tensor:
    """[B, I, J, c], all numbers different."""
    return torch.arange(2.0 * RESIDUES**2 * CHANNELS, dtype=torch.float64).view(2, RESIDUES, RESIDUES, CHANNELS)


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
