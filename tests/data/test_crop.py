"""Distribution and bounds of crops (supplement 1.2.8)."""

from __future__ import annotations

import numpy as np
import pytest

from evodsp.data.samples.crop import Crop, centre_crop, crop_start, training_crop
from evodsp.rng import Draws

ALMOST_ONE = 1 - 2**-24


def test_clamped_samples_start_uniformly() -> None:
    """Every start from 0 to the surplus, the last included, is equally likely; the shift is ignored."""
    positions = (np.arange(6000) + 0.5) / 6000
    starts = [crop_start(5, clamped=True, shift=0.99, position=p) for p in positions]
    np.testing.assert_array_equal(np.bincount(starts), [1000] * 6)


def test_unclamped_samples_favour_the_beginning() -> None:
    """P(start) = mean over x in 0..n of [start <= n - x] / (n - x + 1)."""
    grid = (np.arange(360) + 0.5) / 360
    starts = [crop_start(2, clamped=False, shift=s, position=p) for s in grid for p in grid]
    expected = np.array([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]) / 3
    np.testing.assert_allclose(np.bincount(starts) / len(starts), expected, atol=1e-3)


@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize("surplus", [1, 3, 10_000])
def test_extreme_draws_stay_inside_the_chain(clamped: bool, surplus: int) -> None:
    draws = [0.0, 0.5, ALMOST_ONE]
    starts = [crop_start(surplus, clamped, shift, position) for shift in draws for position in draws]
    assert min(starts) == 0
    assert max(starts) == surplus


@pytest.mark.parametrize("crop_size", [None, 10, 11])
def test_a_short_chain_is_whole(crop_size: int | None) -> None:
    assert training_crop(10, crop_size, True, Draws.root(0)) == centre_crop(10, crop_size) == Crop(0, 10)


def test_training_crop_depends_on_its_stream_only() -> None:
    crops = [training_crop(100, 20, True, Draws.root(seed)) for seed in (*range(30), *range(30))]
    assert crops[:30] == crops[30:]
    assert len(set(crops)) > 10
    assert all(crop.length == 20 and 0 <= crop.start <= 80 for crop in crops)


def test_centre_crop() -> None:
    assert centre_crop(11, 4) == Crop(3, 4)
    assert centre_crop(11, 4).residues == slice(3, 7)
