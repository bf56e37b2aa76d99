"""`dropout`: masks addressed by global position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evodsp.parallel import dropout, split, switch
from evodsp.rng import Draws
from tests.ranks import RankPool

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
