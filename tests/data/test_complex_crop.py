"""Crops of complexes: bounds, distributions, and neighbourhoods computed with all distances."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from evodsp.data.samples.raw_features import (
    Crop,
    centre_crop,
    complex_crop,
    contiguous_crop,
    crop_start,
    interface_residues,
    piece,
    sequence_features,
    spatial_crop,
)
from evodsp.data.templates.features import TemplateFeatures
from evodsp.rng import Draws

Complex = tuple[list[int], np.ndarray, np.ndarray]


def cloud(lengths: list[int], seed: int = 0, size: float = 30.0) -> Complex:
    """Chains whose atoms lie in a box; a tenth of them is not resolved and at zero."""
    rng = np.random.default_rng(seed)
    mask = (rng.uniform(size=sum(lengths)) > 0.1).astype(np.float32)
    return lengths, (rng.uniform(-size, size, (sum(lengths), 3)) * mask[:, None]).astype(np.float32), mask


def apart(lengths: list[int]) -> Complex:
    """Straight chains that are far from each other."""
    positions = np.concatenate([[[3.8 * k, 1000 * chain, 0] for k in range(n)] for chain, n in enumerate(lengths)])
    return lengths, positions.astype(np.float32), np.ones(sum(lengths), np.float32)


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1, 1], [3, 1, 12, 5], [1, 30], [20, 20, 20]])
@pytest.mark.parametrize("crop_size", [1, 2, 4, 11, 1000])
def test_a_contiguous_crop_is_a_piece_of_each_chain(lengths: list[int], crop_size: int) -> None:
    """Catches crops of another size, residues twice or beyond a chain, and numbers that are not sorted."""
    chain = np.repeat(np.arange(len(lengths)), lengths)
    for seed in range(30):
        residues = contiguous_crop(lengths, crop_size, Draws.root(seed)).residues
        assert len(residues) == min(crop_size, sum(lengths))
        assert (np.diff(residues) > 0).all()
        assert residues[0] >= 0
        assert residues[-1] < sum(lengths)
        for number in range(len(lengths)):
            assert (np.diff(residues[chain[residues] == number]) == 1).all()


def algorithm_1(lengths: list[int], crop_size: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every course of algorithm 1, as the supplement writes it: the residues, and the probability."""
    orders = list(itertools.permutations(range(len(lengths))))

    def rest(order: tuple[int, ...], added: int, remaining: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        if not order:
            yield (), Fraction(1)
            return
        length, offset = lengths[order[0]], sum(lengths[: order[0]])
        remaining -= length
        largest = min(crop_size - added, length)
        smallest = min(length, max(0, crop_size - (added + remaining)))
        for size in range(smallest, largest + 1):
            for start in range(length - size + 1):
                here = tuple(range(offset + start, offset + start + size))
                chance = Fraction(1, (largest - smallest + 1) * (length - size + 1))
                for others, probability in rest(order[1:], added + size, remaining):
                    yield tuple(sorted(here + others)), chance * probability

    for order in orders:
        for residues, probability in rest(order, 0, sum(lengths)):
            yield residues, probability / len(orders)


@pytest.mark.parametrize(("lengths", "crop_size"), [([2, 1, 4], 4), ([3, 3, 3], 3), ([5, 2], 6)])
def test_contiguous_crops_have_the_distribution_of_algorithm_1(lengths: list[int], crop_size: int) -> None:
    """Catches a fixed order of chains, ranges that lack an end, and sizes that favour some chains."""
    expected: Counter[tuple[int, ...]] = Counter()
    for residues, probability in algorithm_1(lengths, crop_size):
        expected[residues] += probability  # type: ignore[assignment]
    assert sum(expected.values()) == 1
    samples = 1500
    found = Counter(
        tuple(contiguous_crop(lengths, crop_size, Draws.root(seed)).residues.tolist()) for seed in range(samples)
    )
    assert set(found) <= set(expected)
    chi_squared = sum((found[k] - samples * float(p)) ** 2 / (samples * float(p)) for k, p in expected.items())
    freedom = len(expected) - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("lengths", [[300, 1, 250], [400], [1, 1], [40, 0, 30]])
def test_interfaces_are_those_of_all_distances(lengths: list[int]) -> None:
    """Catches pairs that are lost between the parts, atoms of the same chain, and absent atoms that are near at zero."""
    for seed in range(3):
        _, positions, mask = cloud(lengths, seed)
        positions *= [1.0, 0.7, 2.0]
        chain = np.repeat(np.arange(len(lengths)), lengths)
        distance = np.linalg.norm(positions[:, None].astype(float) - positions, axis=-1)
        pairs = (distance < 10) & (chain[:, None] != chain) & (mask[:, None] * mask > 0)
        np.testing.assert_array_equal(interface_residues(lengths, positions, mask), np.flatnonzero(pairs.any(1)))
    nothing = np.zeros_like(mask)
    assert len(interface_residues(lengths, positions, nothing)) == 0


def test_atoms_ten_angstrom_apart_are_no_interface() -> None:
    """Catches another bound, and chains that are told apart by the place of their residues."""
    lengths, positions, mask = [1, 1], np.zeros((2, 3), np.float32), np.ones(2, np.float32)
    positions[1, 2] = 10
    assert interface_residues(lengths, positions, mask).tolist() == []
    positions[1, 2] = 9.99
    assert interface_residues(lengths, positions, mask).tolist() == [0, 1]
    assert interface_residues([2], positions, mask).tolist() == []


def test_a_spatial_crop_is_what_is_nearest_to_an_interface_residue() -> None:
    """Catches another centre than a residue of an interface, a centre that is never drawn, and residue 0, which is false."""
    lengths, positions, mask = apart([6, 5])
    # The chains meet at residues 0 and 1 of the first, 9 and 10 of the second.
    positions[6:] = positions[:5] + np.array([-15, 6, 0])
    interface = interface_residues(lengths, positions, mask).tolist()
    assert interface[0] == 0
    distance = np.linalg.norm(positions[:, None] - positions, axis=-1) + 1e-3 * np.arange(11)
    wanted = {tuple(sorted(distance[centre].argsort()[:4].tolist())) for centre in interface}
    crops = [spatial_crop(lengths, positions, mask, 4, Draws.root(seed)) for seed in range(60)]
    assert {tuple(crop.residues.tolist()) for crop in crops if crop is not None} == wanted
    centres = [spatial_crop(lengths, positions, mask, 1, Draws.root(seed)) for seed in range(200)]
    found = Counter(int(crop.residues[0]) for crop in centres if crop is not None)
    assert sorted(found) == interface
    assert min(found.values()) > 200 / len(interface) / 2


def test_the_tie_breaker_is_a_thousandth_of_an_angstrom_per_residue() -> None:
    """Catches a tie-breaker that is lost in rounding, or that outweighs distances."""
    for surplus, kept in ((0.0005, 1), (0.0015, 2)):
        positions = np.array([[0, 0, 0], [20 + surplus, 0, 0], [0, 20, 0], [0, 0, 5]], np.float32)
        for seed in range(8):
            crop = spatial_crop([3, 1], positions, np.ones(4, np.float32), 3, Draws.root(seed))
            assert crop is not None
            assert crop.residues.tolist() == [0, kept, 3]  # residues 0 and 3 are the interface


def test_unresolved_residues_come_last() -> None:
    """Catches absent atoms at zero that are near to everything, and an order of them that is not fixed."""
    positions, mask = np.zeros((8, 3), np.float32), np.ones(8, np.float32)
    positions[:, 0] = [0, 1, 2, 3, 4, 5, 6, 7]
    mask[[1, 2, 5]] = positions[[1, 2, 5]] = 0
    for seed in range(10):
        five, seven = (spatial_crop([4, 4], positions, mask, size, Draws.root(seed)) for size in (5, 7))
        assert five is not None
        assert seven is not None
        assert five.residues.tolist() == [0, 3, 4, 6, 7]
        assert seven.residues.tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_without_an_interface_the_crop_is_contiguous() -> None:
    """Catches a spatial crop around nothing, as for a single chain."""
    for lengths in ([9, 8, 7], [24]):
        x = apart(lengths)
        for seed in range(10):
            found = complex_crop(*x, 6, Draws.root(seed), spatial_fraction=1.0)
            assert found.residues.tolist() == contiguous_crop(lengths, 6, Draws.root(seed)).residues.tolist()


def test_a_crop_depends_on_its_stream_only() -> None:
    """Catches random numbers of the process."""
    x = cloud([30, 1, 39], size=12)
    crops = [
        complex_crop(*x, 20, Draws.root(seed), spatial_fraction=0.5).residues.tolist()
        for seed in (*range(30), *range(30))
    ]
    assert crops[:30] == crops[30:]
    assert len({tuple(crop) for crop in crops}) > 20
    assert all(len(crop) == 20 for crop in crops)


# Distribution and bounds of crops (supplement 1.2.8).


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
