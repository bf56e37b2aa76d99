"""Distribution and bounds of crops (supplement 1.2.8)."""

from __future__ import annotations

import numpy as np
import pytest

from evodsp.data.samples.raw_features import Crop, centre_crop, crop_start, piece, sequence_features, training_crop
from evodsp.data.templates.features import TemplateFeatures
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
    for crop in (training_crop(10, crop_size, True, Draws.root(0)), centre_crop(10, crop_size)):
        assert crop.residues.tolist() == list(range(10))


def test_training_crop_depends_on_its_stream_only() -> None:
    crops = [training_crop(100, 20, True, Draws.root(seed)).residues for seed in (*range(30), *range(30))]
    starts = [int(crop[0]) for crop in crops]
    assert starts[:30] == starts[30:]
    assert len(set(starts)) > 10
    assert all(0 <= start <= 80 for start in starts)
    assert all(crop.tolist() == list(range(start, start + 20)) for crop, start in zip(crops, starts, strict=True))


def test_centre_crop() -> None:
    assert centre_crop(11, 4).residues.tolist() == [3, 4, 5, 6]


def test_a_crop_of_several_pieces() -> None:
    """Catches features, templates or labels that take all residues between the first and the last of the crop."""
    crop = Crop(np.array([0, 1, 5, 6, 9]))
    assert crop.first == -1
    assert piece(3, 4).first == 3
    aatype = np.arange(12, dtype=np.int32)
    features = sequence_features(aatype, crop)
    assert features["aatype"].tolist() == features["residue_index"].tolist() == [0, 1, 5, 6, 9]
    templates = TemplateFeatures(
        names=("1abc_A", "2abc_A"),
        aatype=np.stack([aatype, aatype + 1]).astype(np.int8),
        positions=np.arange(2 * 12 * 37 * 3, dtype=np.float32).reshape(2, 12, 37, 3),
        mask=np.ones((2, 12, 37), np.float32),
        sum_probs=np.zeros(2, np.float32),
    ).select(np.array([1]), crop.residues)
    assert templates.aatype.tolist() == [[1, 2, 6, 7, 10]]
    assert templates.positions[0, :, 0, 0].tolist() == [(12 + residue) * 37 * 3 for residue in (0, 1, 5, 6, 9)]
