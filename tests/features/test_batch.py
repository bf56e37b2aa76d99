"""Features against those that NumPy makes, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.samples.dataset import collate
from evodsp.data.samples.raw_features import HOST, SAMPLED, Crop, FeatureSizes, max_clusters, piece, raw_features
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.errors import UserError
from evodsp.features.batch import draw, with_features
from evodsp.features.clusters import nearest_by_products, nearest_clusters
from evodsp.rng import Draws
from tests.builders.fake_cuda import measure_features
from tests.builders.host_waits import HostWaits
from tests.builders.numpy_features import make_features
from tests.builders.templates import random_templates

CONFIG = FeatureConfig(crop_size=17, msa_clusters=8, extra_msa=20, recycles=3)


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    crop: Crop
    cycles: int = 4
    deletions: float = 0.1
    """Share of cells with deletions."""
    seed: int = 0

    @property
    def msa(self) -> MsaFeatures:
        """Sequences that agree with the query in half of their columns; a gap where they have nothing. Some are equal, some
        are gaps only."""
        rng = np.random.default_rng(self.seed)
        query = rng.integers(0, 20, self.columns)
        msa = np.where(
            rng.random((self.rows, self.columns)) < 0.5, query, rng.integers(0, 22, (self.rows, self.columns))
        )
        msa[self.rows // 2 :] = np.where(msa[self.rows // 2 :] > 14, 21, msa[self.rows // 2 :])
        msa[3::5] = 21
        msa[4::5] = msa[1] if self.rows > 1 else msa[0]
        msa[0] = query
        deletions = rng.integers(1, 90, msa.shape) * (rng.random(msa.shape) < self.deletions)
        return MsaFeatures(msa.astype(np.int8), deletions.astype(np.int32), letter_profile(msa.astype(np.int8)))


def raw(case: Case, config: FeatureConfig) -> dict[str, Tensor]:
    found = raw_features(case.msa.msa[0].astype(np.int32), case.msa, config, draws_of(case), case.cycles, case.crop)
    return {name: torch.from_numpy(values) for name, values in found.items()}


def expected(case: Case, config: FeatureConfig, sizes: FeatureSizes | None) -> dict[str, np.ndarray]:
    aatype = case.msa.msa[0].astype(np.int32)
    return make_features(aatype, case.msa, config, draws_of(case), case.cycles, case.crop, sizes)


def draws_of(case: Case) -> Draws:
    return Draws.root(case.seed).at("sample", case.rows)


def assert_same(found: Tensor, wanted: np.ndarray, name: str) -> None:
    assert found.numpy().dtype == wanted.dtype, name
    np.testing.assert_array_equal(found, wanted, err_msg=name)


DEEP = Case(rows=60, columns=29, crop=piece(5, 17))
CASES = {
    "deep": DEEP,
    "one row": Case(1, 29, piece(12, 17)),
    "two rows": Case(2, 29, piece(0, 17)),
    "as many rows as clusters": Case(8, 17, piece(0, 17), cycles=2),
    "fewer rows than clusters": Case(6, 11, piece(0, 11), cycles=3),
    "no deletions": Case(33, 29, piece(1, 17), deletions=0.0, cycles=1),
    "one residue": Case(40, 1, piece(0, 1)),
    "deletions everywhere": Case(45, 20, piece(3, 17), deletions=1.0, seed=2),
    "residues that are not neighbours": Case(45, 29, Crop(np.array([0, 1, 2, 7, 9, 11, 12, 13, 20, 21, 28])), seed=3),
    "two pieces": Case(45, 29, Crop(np.array([*range(1, 9), *range(20, 29)])), seed=4),
}
CONFIGS = {
    "as it is": CONFIG,
    "blocks deleted": replace(CONFIG, block_delete=True),
    "all but the query deleted": replace(CONFIG, block_delete=True, block_delete_blocks=40),
    "all letters masked": replace(CONFIG, masked_msa_fraction=1.0, masked_profile=0.5, masked_same=0.3),
    "nothing masked": replace(CONFIG, masked_msa_fraction=0.0),
    "with templates": replace(CONFIG, max_templates=3),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_features_are_those_of_numpy(config: FeatureConfig) -> None:
    """A row, a letter, a cluster or a mean that differs from NumPy's, in the edge cases of real alignments."""
    sizes = FeatureSizes(17, max_clusters(config), config.extra_msa)
    for case in CASES.values():
        found = with_features(collate([raw(case, config)]), config)
        wanted = expected(case, config, sizes)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert_same(found[name][0], values, name)


@pytest.mark.parametrize("config", [CONFIGS["blocks deleted"], replace(CONFIG, crop_size=None)], ids=["crop", "whole"])
def test_a_batch_holds_each_sample_in_its_corner(config: FeatureConfig) -> None:
    """Samples of other depths and lengths cut at the wrong places, and padding that is not zero."""
    cases = [replace(case, cycles=2) for case in CASES.values()]
    found = with_features(collate([raw(case, config) for case in cases]), config)
    corners = [expected(case, config, None) for case in cases]
    for name in SAMPLED:
        largest = np.max([corner[name].shape for corner in corners], 0)
        if config.crop_size is None:
            assert found[name].shape[1:] == tuple(largest), name
        for values, wanted in zip(found[name], corners, strict=True):
            padded = np.zeros(values.shape, wanted[name].dtype)
            padded[tuple(slice(size) for size in wanted[name].shape)] = wanted[name]
            assert_same(values, padded, name)


def test_templates_stand_in_every_iteration() -> None:
    """An axis of iterations that other features have and templates have not."""
    config, case = CONFIGS["with templates"], CASES["fewer rows than clusters"]
    templates = random_templates(2, 11)
    aatype = case.msa.msa[0].astype(np.int32)
    sample = raw_features(aatype, case.msa, config, draws_of(case), 3, case.crop, templates)
    found = with_features(collate([{name: torch.from_numpy(v) for name, v in sample.items()}]), config)
    sizes = FeatureSizes(17, max_clusters(config), config.extra_msa)
    wanted = make_features(aatype, case.msa, config, draws_of(case), 3, case.crop, sizes, templates)
    for name, values in wanted.items():
        assert_same(found[name][0], values, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_precision_of_a_run_changes_no_letter(dtype: torch.dtype) -> None:
    """Lightning converts a batch before it is on the device: a rounded profile draws other letters."""
    config = CONFIGS["all letters masked"]
    batch = collate([raw(DEEP, config)])
    converted = {name: v.to(dtype) if v.is_floating_point() else v for name, v in batch.items()}
    found, wanted = with_features(converted, config), with_features(batch, config)
    assert all(torch.equal(found[name], wanted[name]) for name in SAMPLED)


def test_products_find_the_clusters_of_bit_planes() -> None:
    """Products that count gaps or masks as agreement, break ties otherwise, or lose counts above 256 columns. CPUs never use
    them in a run."""
    rng = np.random.default_rng(0)
    for size, number, columns, letters in ((7, 2500, 41, 3), (3, 5, 700, 2), (1, 4, 1, 22)):
        centres = rng.integers(0, letters, (3, size, columns)).astype(np.int8)
        centres[0][rng.random((size, columns)) < 0.3] = 21
        centres[1][rng.random((size, columns)) < 0.3] = 22
        centres[2, :, 1:] = 21
        rows = rng.integers(0, letters, (number, columns)).astype(np.int8)
        rows[::4, ::2] = 21
        rows[-1] = 21
        found = nearest_by_products(torch.from_numpy(centres), torch.from_numpy(rows))
        every = torch.arange(number).expand(3, -1)
        by_bits = nearest_clusters(torch.from_numpy(centres), torch.from_numpy(rows), every, [number] * 3)
        np.testing.assert_array_equal(found, by_bits)


def test_random_numbers_are_the_addressed_ones() -> None:
    """Keys with a sign bit, sorting by half of a number, an order in which rows that are left out come first, and numbers of
    another stream where streams are drawn together and one of them is shorter."""
    streams = [Draws(key) for key in (0, 1, 2**63, 2**64 - 1, 0x89ABCDEF01234567)]
    keys = torch.tensor([stream.signed_key() for stream in streams])
    keys = torch.stack([keys, keys.roll(1), keys.roll(2)], 1)
    kept = torch.ones(5, 4001, dtype=torch.bool)
    for clusters in (9, 500):
        drawn = draw(keys, kept, clusters, 11)
        for number, stream in enumerate(streams):
            np.testing.assert_array_equal(drawn.order[number, 1:], 1 + stream.permutation(4000))
            for found, shift in ((drawn.replace, 1), (drawn.letter, 2)):
                np.testing.assert_array_equal(found[number].flatten(), streams[number - shift].uniform(clusters * 11))
    kept[:, 1:4000:2] = False
    few = draw(keys, kept, 1, 1).order
    for order, stream in zip(few, streams, strict=True):
        whole = 1 + stream.permutation(4000)
        np.testing.assert_array_equal(order[1:2001], whole[whole % 2 == 0])
    assert (few.sort(1).values == torch.arange(4001)).all()


def test_nothing_makes_the_host_wait() -> None:
    """A size that is read from the device. The meta device refuses what depends on its numbers; `HostWaits` lists copies."""
    config = CONFIGS["blocks deleted"]
    batch = collate([raw(DEEP, config), raw(CASES["one row"], config)])
    on_device = {name: values if name in HOST else values.to("meta") for name, values in batch.items()}
    with HostWaits() as seen:
        found = with_features(on_device, config)
    assert seen.waits == []
    wanted = with_features(batch, config)
    assert {name: (v.shape, v.dtype) for name, v in found.items()} == {n: (v.shape, v.dtype) for n, v in wanted.items()}


def test_an_alignment_beyond_32_bits_is_refused() -> None:
    """Places of deletions that wrap around."""
    letters = np.broadcast_to(np.zeros((1, 1), np.int8), (1 << 21, 1 << 10))
    none = np.broadcast_to(np.zeros((1, 1), np.int32), letters.shape)
    msa = MsaFeatures(letters, none, np.zeros((1 << 10, 22), np.float32))
    with pytest.raises(UserError, match=r"2097152 x 1024 cells, more than 2\^31"):
        raw_features(
            np.zeros(1 << 10, np.int32), msa, replace(CONFIG, crop_size=None), Draws.root(0), 1, piece(0, 1 << 10)
        )


# What making the features of a sample would launch and move on a GPU, counted without one. Limits lie at what was counted.


def test_features_of_one_sample() -> None:
    """Catches launches for each sequence, cluster or iteration, a table that is copied from the host for each sample, and a
    size that is read from the device, for which the host waits."""
    sizes = {"columns": 40, "crop": 32, "clusters": 12, "extra": 20}
    one, four = (measure_features(rows=180, cycles=cycles, **sizes) for cycles in (1, 4))
    assert (one.host, four.host) == ({}, {})
    assert one.launches <= 240
    assert four.launches <= 254
    deeper, shallow = (measure_features(rows=rows, cycles=4, **sizes) for rows in (360, 90))
    assert deeper.launches == four.launches
    assert shallow.launches <= 264  # zeros where an iteration has fewer rows than another
    full = {"rows": 16_384, "columns": 300, "crop": 256, "clusters": 128, "extra": 1024}
    assert measure_features(cycles=4, **full).launches <= 276
