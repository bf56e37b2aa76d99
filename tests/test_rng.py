"""Addressed random numbers: the published values, the same in NumPy and torch, depending only on the address."""

from __future__ import annotations

import numpy as np
import torch

from evodsp.rng import Draws, philox4x32


def test_known_answers() -> None:
    """Catches a wrong constant, number of rounds or sign extension, by Random123's published vectors."""
    zeros = tuple(np.zeros(1, dtype=np.int64) for _ in range(4))
    ones = tuple(np.full(1, 0xFFFFFFFF, dtype=np.int64) for _ in range(4))
    assert [int(w[0]) for w in philox4x32(zeros, (0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    expected = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert [int(w[0]) for w in philox4x32(ones, (0xFFFFFFFF, 0xFFFFFFFF))] == expected


def test_numpy_and_torch_give_the_same_bits() -> None:
    """Catches a dropout mask that differs between a data worker and a device."""
    draws = Draws.root(3).at("dropout", 5)
    positions = np.arange(1000, dtype=np.int64) * 7919 + (1 << 33)
    for ours, theirs in zip(draws.words(positions), draws.words(torch.from_numpy(positions)), strict=True):
        assert np.array_equal(ours, theirs.numpy())


def test_a_draw_depends_on_its_position_only() -> None:
    """Catches a generator with state: a shard must draw the same numbers as the full tensor at its positions."""
    draws = Draws.root(0).at("mask")
    assert np.array_equal(draws.uniform(100)[40:60], draws.uniform_at(np.arange(40, 60)))


def test_a_seed_keeps_its_noise() -> None:
    """Catches noise from another word of the generator: a seed would make other families than it made before."""
    noise = Draws.root(1).at("g").gumbel(2, 2)
    assert np.allclose(noise, [[0.98389216493, 2.14154656113], [0.25452366458, -1.57319489455]], rtol=1e-10)


def test_paths_are_independent() -> None:
    """Catches paths whose parts collide, e.g. (1, 12) and (11, 2)."""
    root = Draws.root(0)
    keys = {root.at(*path).key for path in [(1, 12), (11, 2), ("1", 12), (1,), (12, 1), ("a", "b"), ("ab",)]}
    assert len(keys) == 7


def test_distributions() -> None:
    """Catches a biased conversion from bits to numbers."""
    draws = Draws.root(1)
    u = draws.uniform(200_000)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 0.5) < 3e-3
    assert abs(u.var() - 1 / 12) < 1e-3
    assert sorted(draws.permutation(1000)) == list(range(1000))
    p = np.array([0.1, 0.2, 0.7])
    drawn = np.argmax(np.log(p) + draws.at("g").gumbel(100_000, 3), axis=1)
    assert np.allclose(np.bincount(drawn) / 100_000, p, atol=6e-3)
    counts = np.bincount([draws.at("i", n).integer(2, 6) for n in range(4000)], minlength=6)
    assert (counts[2:] > 850).all()
    assert counts[:2].sum() == 0
