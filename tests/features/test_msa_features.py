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
    target_features,
)
from evodsp.data.sources.msa import MsaFeatures, letter_profile, query_only
from evodsp.errors import UserError
from evodsp.features.batch import Drawn, RawMsa, deletion_value, rows_of, write_features
from evodsp.features.clusters import (
    cluster_profiles,
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


def msa_of(rows: np.ndarray, deletions: np.ndarray | None = None) -> MsaFeatures:
    rows = rows.astype(np.int8)
    counts = np.zeros(rows.shape, np.int32) if deletions is None else deletions.astype(np.int32)
    return MsaFeatures(rows, counts, letter_profile(rows))


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


def test_deletion_values() -> None:
    """Catches single precision that is lost on the way."""
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
    ("clusters", "extra", "columns"), [(7, 900, 41), (3, 1, 1), (5, 0, 9), (300, 120, 300), (9, 40, 64), (40, 900, 65)]
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


def test_block_deletion_spares_the_query_and_stops_at_the_end() -> None:
    keep = kept_rows(10, np.array([0, 8]), 0.3)
    np.testing.assert_array_equal(np.flatnonzero(keep), [0, 3, 4, 5, 6, 7])


def test_single_sequence_of_one_unknown_residue() -> None:
    """The smallest chain: one row, one residue, type X. No axis is empty, all numbers are finite."""
    aatype = encode_sequence("X")
    features = made(
        aatype, query_only(aatype.astype(np.int8)), replace(CONFIG, crop_size=None), Draws.root(0), cycles=1
    )
    assert features["msa_feat"].shape == (1, 1, 1, 49)
    assert features["extra_msa"].shape == (1, 1, 1)
    assert not features["extra_msa_mask"].any()
    assert not features["atom14_atom_exists"].any()
    assert all(np.isfinite(values).all() for values in features.values())
    np.testing.assert_allclose(features["msa_feat"][0, 0, 0, 25:48].sum(), 1, atol=1e-5)


# User errors ---------------------------------------------------------------------------------------------------------


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
