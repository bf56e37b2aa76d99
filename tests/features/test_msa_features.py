"""MSA features against AF2's: step by step with its random numbers, and as a whole where no number is random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.samples.raw_features import (
    FEATURE_AXES,
    SAMPLED,
    TEMPLATE_AXES,
    check_config,
    kept_rows,
    max_clusters,
    piece,
    raw_features,
    target_features,
)
from evodsp.data.sources.msa import MsaFeatures, letter_profile, query_only
from evodsp.errors import UserError
from evodsp.features.batch import Drawn, RawMsa, deletion_value, rows_of, write_features
from evodsp.features.clusters import (
    cluster_profiles,
    mask_letters,
    mean_deletions,
    members,
    nearest_clusters,
    write_one_hot,
)
from evodsp.geometry.residues import encode_sequence
from evodsp.rng import Draws
from tests.builders.finished import made
from tests.builders.templates import from_raw
from tests.shared import load

CONFIG = FeatureConfig(msa_clusters=32, extra_msa=64, max_templates=4, crop_size=72, recycles=1)
"""The configuration of the golden features: 28 clusters beside 4 template rows."""
WHOLE = replace(CONFIG, crop_size=None)


def msa_of(rows: np.ndarray, deletions: np.ndarray | None = None) -> MsaFeatures:
    rows = rows.astype(np.int8)
    counts = np.zeros(rows.shape, np.int32) if deletions is None else deletions.astype(np.int32)
    return MsaFeatures(rows, counts, letter_profile(rows))


def random_msa(rows: int, columns: int, seed: int = 0) -> MsaFeatures:
    """Random sequences that share a quarter to three quarters of the query's letters, with some deletions."""
    rng = np.random.default_rng(seed)
    msa = rng.integers(0, 22, (rows, columns))
    query = rng.integers(0, 20, columns)
    msa = np.where(rng.random((rows, columns)) < rng.uniform(0.25, 0.75, (rows, 1)), query, msa)
    msa[0] = query
    return msa_of(msa, rng.integers(1, 9, msa.shape) * (rng.random(msa.shape) < 0.1))


@pytest.fixture(scope="module")
def steps(golden: Path) -> dict[str, np.ndarray]:
    return load(golden / "featurization/msa_transforms.npz")


@pytest.fixture(scope="module")
def golden_msa(golden: Path, steps: dict[str, np.ndarray]) -> MsaFeatures:
    deletions = load(golden / "features_raw_crop.npz")["deletion_matrix_int"]
    return msa_of(steps["msa_corrected"], deletions)


@pytest.fixture(scope="module")
def flat_msa(golden_msa: MsaFeatures) -> MsaFeatures:
    """The golden MSA with a flat profile, from which every letter can be drawn: the golden replacements are arbitrary."""
    return replace(golden_msa, profile=np.full_like(golden_msa.profile, 1 / 22))


@pytest.fixture(scope="module")
def golden_draws(steps: dict[str, np.ndarray]) -> Drawn:
    """The golden random numbers; the number of each replacement is the middle of the golden letter's interval."""
    true = torch.from_numpy(steps["masked_msa/true_msa"]).long()
    share = torch.full((*true.shape, 23), 0.0, dtype=torch.float64)
    share[..., :20] += CONFIG.masked_uniform / 20
    share[..., :22] += CONFIG.masked_profile / 22  # of the flat profile
    share[..., 22] = 1 - CONFIG.masked_uniform - CONFIG.masked_profile - CONFIG.masked_same
    share.scatter_add_(-1, true[..., None], torch.full((*true.shape, 1), CONFIG.masked_same, dtype=torch.float64))
    drawn = torch.from_numpy(steps["masked_msa/drawn_aa"]).long()[..., None]
    middle = (share.cumsum(-1).gather(-1, drawn) - share.gather(-1, drawn) / 2)[..., 0]
    order = torch.from_numpy(steps["sample_order"].astype(np.int64))
    return Drawn(order[None], torch.from_numpy(steps["masked_msa/uniform"]).double()[None], middle[None])


# Step by step ------------------------------------------------------------------------------------------------------


def int8(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int8))


def test_masking(steps: dict[str, np.ndarray], flat_msa: MsaFeatures, golden_draws: Drawn) -> None:
    """Catches a probability of the mixture, or a boundary between letters, other than AF2's."""
    profile = torch.from_numpy(flat_msa.profile)
    true, draws = int8(steps["masked_msa/true_msa"]), golden_draws
    masked, replaced = mask_letters(true, profile, draws.replace[0], draws.letter[0], CONFIG)
    np.testing.assert_array_equal(replaced, steps["masked_msa/bert_mask"])
    np.testing.assert_array_equal(masked, steps["masked_msa/msa"])


def nearest(centres: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """The cluster of each extra sequence, on a CPU."""
    letters = torch.cat([int8(extra), int8(centres[:1])])
    (found,) = nearest_clusters(int8(centres)[None], letters, torch.arange(len(extra))[None], [len(extra)])
    return found.numpy()


def profiles(clusters: np.ndarray, extra: np.ndarray, assigned: np.ndarray) -> np.ndarray:
    """The profiles of clusters [S, R, 23], written into a part of a larger tensor."""
    around = torch.zeros(len(clusters) + 1, clusters.shape[1] + 2, 30)
    out = around[:-1, :-2, 5:28]
    cluster = torch.from_numpy(assigned.astype(np.int64))[None]
    counted = torch.ones_like(cluster, dtype=torch.bool)
    sizes = members(cluster, counted, len(clusters))
    write_one_hot(out[None], int8(clusters)[None])
    cluster_profiles(int8(extra)[None], cluster, counted, sizes, out[None])
    found = out.numpy().copy()
    out.zero_()
    assert not around.any(), "written beside its place"
    return found


def mean_deletions_of(own: np.ndarray, extra: np.ndarray, assigned: np.ndarray) -> np.ndarray:
    """Mean deletions of clusters from the deletions of all their sequences."""
    cluster = torch.from_numpy(np.concatenate([np.arange(len(own)), assigned]).astype(np.int64))
    deletions = torch.from_numpy(np.concatenate([own, extra]).astype(np.int32))
    row, column = deletions.nonzero(as_tuple=True)
    counted = torch.ones(1, len(cluster), dtype=torch.bool)
    sizes = members(cluster[None, len(own) :], counted[:, len(own) :], len(own))
    found = mean_deletions(cluster[None, row], column, deletions[row, column], counted[:, row], sizes, own.shape[1])
    return found[0].numpy()


def test_nearest_clusters(steps: dict[str, np.ndarray]) -> None:
    found = nearest(steps["masked_msa/msa"], steps["extra_msa"])
    np.testing.assert_array_equal(found, steps["extra_cluster_assignment"])


def test_cluster_summary(steps: dict[str, np.ndarray]) -> None:
    assigned = steps["extra_cluster_assignment"]
    profile = profiles(steps["masked_msa/msa"], steps["extra_msa"], assigned)
    means = mean_deletions_of(steps["deletion_matrix"], steps["extra_deletion_matrix"], assigned)
    np.testing.assert_allclose(profile, steps["cluster_profile"], atol=1e-6)
    np.testing.assert_allclose(means, steps["cluster_deletion_mean"], rtol=1e-6, atol=1e-6)


def test_deletion_values(steps: dict[str, np.ndarray]) -> None:
    """Catches another scale than AF2's, and single precision lost on the way."""
    value = deletion_value(torch.from_numpy(steps["extra_deletion_matrix"].astype(np.int32)))
    np.testing.assert_allclose(value, steps["extra_deletion_value"], atol=1e-6)
    deletions = torch.arange(1, 5000)
    exact = torch.atan(deletions.double() / 3) * (2 / np.pi)
    assert (deletion_value(deletions.int()).double() - exact).abs().max() < 1.2e-7


def golden_features(flat_msa: MsaFeatures, drawn: Drawn) -> dict[str, np.ndarray]:
    """One iteration of the golden MSA's features, given its random numbers."""
    rows, columns = flat_msa.msa.shape
    deletions = flat_msa.deletions.reshape(-1)
    cells = np.flatnonzero(deletions)
    kept, keys = torch.ones(1, rows, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.int64)
    msa = RawMsa(
        *(torch.from_numpy(flat_msa.msa), torch.from_numpy(flat_msa.profile), kept, keys),
        *(torch.from_numpy(cells), torch.from_numpy(deletions[cells])),
        *(slice(0, columns), columns, [rows_of(rows, CONFIG)]),
    )
    sizes = {"residues": columns, "msa": max_clusters(CONFIG), "extra": rows - max_clusters(CONFIG)}
    into = {
        name: torch.zeros(1, *(sizes[axis] for axis in FEATURE_AXES[name] if axis), *unnamed)
        for name, (_, unnamed) in SAMPLED.items()
    }
    write_features(into, msa, drawn, CONFIG)
    return {name: values[0].numpy() for name, values in into.items()}


def test_one_cycle_from_af2s_random_numbers(
    steps: dict[str, np.ndarray], flat_msa: MsaFeatures, golden_draws: Drawn
) -> None:
    """Catches a wrong order of the steps: extra rows are not masked, clusters are compared after masking."""
    features = golden_features(flat_msa, golden_draws)
    for name in ("msa_feat", "extra_msa", "extra_has_deletion", "extra_deletion_value"):
        np.testing.assert_allclose(features[name], steps[name], atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(features["true_msa"], steps["masked_msa/true_msa"])
    np.testing.assert_array_equal(features["bert_mask"], steps["masked_msa/bert_mask"])


def test_processed_features(golden: Path, golden_msa: MsaFeatures) -> None:
    """All inputs of the model: names, shapes, types and padding; values too where AF2 draws no random numbers."""
    raw, processed = load(golden / "features_raw_crop.npz"), load(golden / "features_processed.npz")
    aatype = encode_sequence(raw["sequence"][0].decode())
    features = made(aatype, golden_msa, CONFIG, Draws.root(0), 2, piece(0, 64), from_raw(raw))

    assert set(features) == set(processed) - {"random_crop_to_size_seed"} == {*FEATURE_AXES, *TEMPLATE_AXES}
    for name, values in features.items():
        assert (values.shape, values.dtype) == (processed[name].shape, processed[name].dtype), name
    drawn = {"msa_feat", "true_msa", "bert_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value"}
    for name in features.keys() - drawn - {"residue_index"}:
        np.testing.assert_array_equal(features[name], processed[name], err_msg=name)
    # The golden input is residues 40..103 of a chain.
    np.testing.assert_array_equal(features["residue_index"][:, :64] + 40, processed["residue_index"][:, :64])
    for name in drawn:
        padding = np.ones(features[name].shape, bool)
        padding[:, : 50 if name.startswith("extra") else 28, :64] = False
        assert not features[name][padding].any(), name
    # Which rows are extra is drawn; the query is always the first cluster.
    np.testing.assert_array_equal(features["true_msa"][:, 0], processed["true_msa"][:, 0])


def test_target_feat_of_unknown_residue() -> None:
    """Catches an off-by-one: column 0 marks chain breaks, A is column 1."""
    features = target_features(encode_sequence("AX"))
    np.testing.assert_array_equal(features.argmax(-1), [1, 21])


# Against the supplement's formulas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clusters", "extra", "columns"), [(7, 900, 41), (3, 1, 1), (5, 0, 9), (300, 500, 300), (9, 40, 64), (40, 900, 65)]
)
def test_clustering_agrees_with_one_hot_products(clusters: int, extra: int, columns: int) -> None:
    """Catches rows or columns missed by a partly filled last tile or word, and counts that overflow above 255 columns."""
    rng = np.random.default_rng(clusters)
    letters = 3 if columns == 300 else 23
    centres = rng.integers(0, letters, (clusters, columns)).astype(np.int8)
    others = np.minimum(rng.integers(0, letters, (extra, columns)), 21).astype(np.int8)
    deletions = rng.integers(0, 4, (clusters + extra, columns)).astype(np.int32)

    found = nearest(centres, others)
    weights = np.eye(23) * (np.arange(23) < 21)
    agreement = np.einsum("sla,ela->es", weights[centres], np.eye(23)[others])
    np.testing.assert_array_equal(found, agreement.argmax(1) if extra else np.zeros(0))

    profile = profiles(centres, others, found)
    mean = mean_deletions_of(deletions[:clusters], deletions[clusters:], found)
    member = np.eye(clusters)[found].reshape(extra, clusters)
    size = 1 + 1e-6 + member.sum(0)
    counts = np.eye(23)[centres] + np.einsum("es,ela->sla", member, np.eye(23)[others])
    np.testing.assert_allclose(profile, counts / size[:, None, None], atol=1e-6)
    sums = deletions[:clusters] + np.einsum("es,el->sl", member, deletions[clusters:])
    np.testing.assert_allclose(mean, sums / size[:, None], rtol=2e-6)


def test_gap_and_mask_agree_with_nothing() -> None:
    """Catches gaps counted as agreement: the one common letter decides."""
    clusters = np.array([[21, 21, 21, 22], [0, 1, 2, 3]], np.int8)
    extra = np.array([[21, 21, 21, 3], [21, 21, 21, 21]], np.int8)
    np.testing.assert_array_equal(nearest(clusters, extra), [1, 0])


def test_replacement_follows_its_distribution() -> None:
    """Frequencies of the letters in a million draws, against the probabilities of supplement 1.2.7."""
    rng = np.random.default_rng(0)
    msa = torch.full((1000, 1000), 5, dtype=torch.int8)
    profile = torch.zeros(1000, 22)
    profile[:, 7], profile[:, 21] = 0.25, 0.75
    config = replace(CONFIG, masked_msa_fraction=1.0)
    replace_at, letter = (torch.from_numpy(rng.random(msa.shape)) for _ in range(2))
    masked, replaced = mask_letters(msa, profile, replace_at, letter, config)
    expected = np.zeros(23)
    expected[:20] = 0.1 / 20
    expected[[5, 7, 21, 22]] += [0.1, 0.025, 0.075, 0.7]
    np.testing.assert_allclose(np.bincount(masked.numpy().ravel(), minlength=23) / msa.numel(), expected, atol=1.5e-3)
    assert replaced.all()


def test_no_masking_when_fraction_is_zero() -> None:
    msa = random_msa(4, 9)
    config = replace(CONFIG, masked_msa_fraction=0.0, crop_size=None)
    features = made(msa.msa[0].astype(np.int32), msa, config, Draws.root(0), 1)
    np.testing.assert_array_equal(features["msa_feat"][0, ..., :23].argmax(-1), features["true_msa"][0])
    assert not features["bert_mask"].any()


def test_block_deletion_spares_the_query_and_stops_at_the_end() -> None:
    keep = kept_rows(10, np.array([0, 8]), 0.3)
    np.testing.assert_array_equal(np.flatnonzero(keep), [0, 3, 4, 5, 6, 7])


def test_block_deletion_leaves_rows_out_of_clusters_and_extra() -> None:
    msa = msa_of(np.arange(20)[:, None].repeat(3, 1))
    config = replace(CONFIG, msa_clusters=8, block_delete=True, masked_msa_fraction=0.0, crop_size=None)
    raw = raw_features(msa.msa[0].astype(np.int32), msa, config, Draws.root(3), 1, piece(0, 3))
    features = made(msa.msa[0].astype(np.int32), msa, config, Draws.root(3), 1)
    extra = features["extra_msa"][0, features["extra_msa_row_mask"][0] > 0, 0]
    shown = np.concatenate([features["true_msa"][0, :, 0], extra])
    kept = np.flatnonzero(raw["msa_kept"])
    assert len(kept) < 20
    np.testing.assert_array_equal(np.sort(shown), kept)
    assert features["true_msa"][0, 0, 0] == 0


# Sampling and sizes --------------------------------------------------------------------------------------------------


def test_rows_are_sampled_without_repetition_query_first() -> None:
    msa = msa_of(np.stack([np.arange(90) % 20, np.arange(90) // 20], 1))
    config = replace(WHOLE, msa_clusters=14, extra_msa=30)
    features = made(encode_sequence("AA"), msa, config, Draws.root(1), cycles=3)
    codes = [features[name] @ np.array([1, 20]) for name in ("true_msa", "extra_msa")]
    assert (codes[0][:, 0] == 0).all()
    for rows in np.concatenate(codes, 1):
        assert len(set(rows.tolist())) == 40
    assert (codes[0][0] != codes[0][1]).any(), "each cycle draws anew"


def test_deletions_stay_with_their_extra_rows() -> None:
    """Catches letters and deletions of extra rows truncated differently."""
    rows = np.arange(20)[:, None].repeat(2, 1)
    config = replace(WHOLE, msa_clusters=7, extra_msa=10)
    features = made(encode_sequence("AA"), msa_of(rows, deletions=rows), config, Draws.root(1), cycles=1)
    assert features["extra_msa"].shape == (1, 10, 2)
    expected = deletion_value(torch.from_numpy(features["extra_msa"])).numpy()
    np.testing.assert_array_equal(features["extra_deletion_value"], expected)
    np.testing.assert_array_equal(features["extra_has_deletion"], expected > 0)


def test_late_crop_equals_cropping_the_finished_features() -> None:
    """Cropping before the cluster summary must give the same values as cropping the finished features."""
    msa, crop = random_msa(60, 40), piece(11, 17)
    config = replace(WHOLE, msa_clusters=12)
    aatype = msa.msa[0].astype(np.int32)
    whole, cropped = (made(aatype, msa, config, Draws.root(5), 1, c) for c in (piece(0, 40), crop))
    for name in SAMPLED:
        axes, values = FEATURE_AXES[name], whole[name]
        if "residues" in axes:
            values = values.take(range(11, 28), axis=1 + axes.index("residues"))
        np.testing.assert_array_equal(cropped[name], values, err_msg=name)


def test_fixed_sizes_only_add_zeros() -> None:
    msa, aatype = random_msa(9, 13), encode_sequence("ACDEFGHIKLMNP")
    natural = made(aatype, msa, WHOLE, Draws.root(2), cycles=2)
    padded = made(aatype, msa, replace(CONFIG, crop_size=20), Draws.root(2), cycles=2)
    for name, values in natural.items():
        corner = tuple(slice(size) for size in values.shape)
        np.testing.assert_array_equal(padded[name][corner], values)
        assert np.abs(padded[name]).sum() == pytest.approx(np.abs(values).sum())
    assert padded["msa_mask"].shape == (2, 28, 20)
    assert padded["msa_mask"].sum() == 2 * 9 * 13


def test_single_sequence_of_one_unknown_residue() -> None:
    """The smallest chain: one row, one residue, type X. No axis is empty, all numbers are finite."""
    aatype = encode_sequence("X")
    features = made(aatype, query_only(aatype.astype(np.int8)), WHOLE, Draws.root(0), cycles=1)
    assert features["msa_feat"].shape == (1, 1, 1, 49)
    assert features["extra_msa"].shape == (1, 1, 1)
    assert not features["extra_msa_mask"].any()
    assert not features["atom14_atom_exists"].any()
    assert all(np.isfinite(values).all() for values in features.values())
    np.testing.assert_allclose(features["msa_feat"][0, 0, 0, 25:48].sum(), 1, atol=1e-5)


def test_features_are_functions_of_seed_and_cycle() -> None:
    """Fewer cycles or a second call give the same numbers; another seed gives different ones."""
    msa, aatype = random_msa(50, 8), encode_sequence("ACDEFGHI")
    config = replace(WHOLE, msa_clusters=12)
    three = made(aatype, msa, config, Draws.root(7), cycles=3)
    one = made(aatype, msa, config, Draws.root(7), cycles=1)
    other = made(aatype, msa, config, Draws.root(8), cycles=1)
    np.testing.assert_array_equal(three["msa_feat"][:1], one["msa_feat"])
    assert (other["msa_feat"] != one["msa_feat"]).any()


# User errors ---------------------------------------------------------------------------------------------------------


def test_letters_to_residue_types() -> None:
    np.testing.assert_array_equal(encode_sequence("ARVXUBé-"), [0, 1, 19, 20, 20, 20, 20, 20])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("msa_clusters", 4),
        ("extra_msa", 0),
        ("crop_size", 0),
        ("recycles", -1),
        ("masked_msa_fraction", 1.5),
        ("masked_same", 0.81),
        ("block_delete_fraction", -0.1),
        ("block_delete_blocks", -1),
    ],
)
def test_impossible_configs_are_named(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field):
        check_config(replace(CONFIG, **{field: value}))


def test_shares_that_add_up_to_one_are_possible() -> None:
    """Catches shares refused because their sum in binary is 1.0000000000000002, or because no row is left for [MASK]."""
    check_config(replace(CONFIG, masked_uniform=0.33, masked_profile=0.56, masked_same=0.11))
