"""Samples: reproducible for every worker and resume, features and labels of the same residues, edge cases, user errors."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.records import Alignment, Chain, ProteinSequence
from evodsp.data.samples.dataset import Sample, SampleDataset, collate, existing_entries, listed_sizes, load_record
from evodsp.data.samples.raw_features import FEATURE_AXES
from evodsp.errors import UserError
from evodsp.features.batch import prediction_sample, with_features
from evodsp.geometry.frames import structure_labels
from evodsp.geometry.residues import encode_sequence
from tests.builders.alignments import make_alignment
from tests.builders.chains import AMINO_ACIDS, MemoryStore, make_chain
from tests.builders.finished import finished

CONFIG = FeatureConfig(crop_size=12, msa_clusters=6, extra_msa=7, recycles=3)
WHOLE = replace(CONFIG, crop_size=None)


FIVE = [make_chain(f"{i}abc", (AMINO_ACIDS[i:] + AMINO_ACIDS)[: 17 + 3 * i]) for i in range(5)]


def dataset(
    config: FeatureConfig = CONFIG,
    training: bool = True,
    chains: list[Chain] = FIVE,
    seed: int = 4,
    batch_group: int = 1,
) -> SampleDataset:
    keys = [chain.key for chain in chains]
    return SampleDataset(MemoryStore(*chains), keys, config, seed, training, batch_group)


def assert_equal(one: Sample, two: Sample) -> None:
    assert set(one) == set(two)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=0, msg=name)


# Addressing ----------------------------------------------------------------------------------------------------------


def test_a_sample_depends_on_seed_and_index_only() -> None:
    """Catches dependence on earlier reads or on the process: a resumed run must continue with the same samples."""
    first, later = dataset(), dataset()
    for index in (0, 3, 12):
        later[index]
    assert_equal(first[7], later[7])
    assert_equal(first[7], pickle.loads(pickle.dumps(later))[7])
    other = dataset(seed=5)
    assert [first.key_of(i) for i in range(40)] != [other.key_of(i) for i in range(40)]


def test_each_epoch_shows_every_chain_once_in_a_new_order() -> None:
    data = dataset()
    epochs = [tuple(data.key_of(5 * epoch + i) for i in range(5)) for epoch in range(8)]
    assert all(set(epoch) == set(data.keys) for epoch in epochs)
    assert len(set(epochs)) > 4


def test_number_of_cycles_is_common_to_a_group() -> None:
    data = dataset(batch_group=4)
    cycles = [data.cycles_of(i) for i in range(400)]
    assert all(len(set(cycles[i : i + 4])) == 1 for i in range(0, 400, 4))
    counts = Counter(cycles)
    assert set(counts) == {1, 2, 3, 4}
    assert min(counts.values()) > 40
    assert len(finished(data[1], data.config)["aatype"]) == cycles[1]


def test_the_crop_is_that_of_its_fape() -> None:
    """Catches a crop that is drawn as if FAPE were clamped where it is not, or the other way round."""
    chain = make_chain("0abc", (AMINO_ACIDS * 4)[:70])

    def starts(fraction: float) -> tuple[list[int], list[bool]]:
        data = dataset(replace(CONFIG, clamp_fape_fraction=fraction, recycles=0), chains=[chain])
        samples = [data[index] for index in range(24)]
        return [int(s["residue_index"].flatten()[0]) for s in samples], [bool(s["use_clamped_fape"]) for s in samples]

    (unclamped, none), (clamped, every), (found, flags) = starts(0.0), starts(1.0), starts(0.5)
    assert not any(none)
    assert all(every)
    assert 4 < sum(flags) < 20
    assert found == [c if flag else u for c, u, flag in zip(clamped, unclamped, flags, strict=True)]
    # The same draws, of which one moves the end of what is drawn from towards the beginning.
    assert all(u <= c for u, c in zip(unclamped, clamped, strict=True))
    assert sum(u < c for u, c in zip(unclamped, clamped, strict=True)) > 12


def test_validation_is_the_same_in_every_epoch() -> None:
    """Validation gives the keys in order, all recycling iterations, the middle of the chain, unclamped; and iteration ends."""
    data = dataset(training=False)
    samples = list(data)
    assert [data.key_of(i) for i in range(5)] == [chain.key for chain in FIVE]
    assert all(len(sample["msa_keys"]) == 4 and sample["use_clamped_fape"] == 0 for sample in samples)
    assert samples[0]["residue_index"][0].tolist() == list(range(2, 14))
    assert_equal(samples[3], data[3])
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(IndexError):
        dataset().key_of(-1)


# Features and labels -------------------------------------------------------------------------------------------------


def test_features_and_labels_show_the_same_residues() -> None:
    data = dataset(replace(CONFIG, recycles=1))
    for index in range(20):
        sample, chain = finished(data[index], data.config), data.source.chain(data.key_of(index))
        shown = sample["residue_index"][0]
        assert (shown == sample["residue_index"]).all()
        assert shown.tolist() == list(range(int(shown[0]), int(shown[0]) + 12))
        np.testing.assert_array_equal(sample["aatype"][-1], encode_sequence(chain.sequence)[shown])
        np.testing.assert_array_equal(sample["all_atom_positions"], chain.positions[shown])
        np.testing.assert_array_equal(sample["all_atom_mask"] > 0, sample["atom37_atom_exists"][0] > 0)
        # Row 0 of the MSA is always the query.
        np.testing.assert_array_equal(sample["true_msa"][:, 0], sample["aatype"])


def test_labels_are_those_of_the_whole_chain() -> None:
    """Catches labels computed from the crop: phi and omega of its first residue need the residue before it."""
    data = dataset(training=False)
    sample, chain = data[4], FIVE[4]
    shown = sample["residue_index"][0].long()
    aatype = torch.from_numpy(encode_sequence(chain.sequence))
    whole = structure_labels(aatype, torch.from_numpy(chain.positions), torch.from_numpy(chain.mask))
    assert sample["torsion_angles_mask"][0, :2].tolist() == [1, 1]
    for name in set(whole) - set(FEATURE_AXES):
        torch.testing.assert_close(sample[name].double(), whole[name][shown].double(), msg=name)


def test_names_and_types_are_the_golden_ones(golden: Path) -> None:
    sample = finished(dataset()[0], CONFIG)
    with np.load(golden / "labels.npz") as labels:
        expected = {name: labels[name] for name in labels.files if name != "backbone_affine_tensor"}
    assert set(expected) <= set(sample)
    for name, values in expected.items():
        assert sample[name].shape == ((12, *values.shape[1:]) if values.ndim else ()), name
    assert {tensor.dtype for tensor in sample.values()} == {torch.int32, torch.float32}
    assert set(FEATURE_AXES) <= set(sample)
    for name, axes in FEATURE_AXES.items():
        assert sample[name].ndim == 1 + len(axes), f"{name} has lost its axis of recycling iterations"


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("length", [1, 12, 30])
def test_shapes_are_fixed_with_a_crop_size(length: int, rows: int) -> None:
    """Short chains and shallow alignments are padded, long and deep ones cropped: all samples have one shape."""
    chain = make_chain("1abc", (AMINO_ACIDS * 2)[:length])
    data = SampleDataset(MemoryStore(chain, rows=rows), [chain.key], replace(CONFIG, recycles=0), 0, training=True)
    sample = finished(data[0], data.config)
    assert sample["msa_feat"].shape == (1, 6, 12, 49)
    assert sample["extra_msa"].shape == (1, 7, 12)
    assert sample["all_atom_positions"].shape == (12, 37, 3)
    assert sample["seq_mask"].sum() == sample["seq_length"].item() == min(length, 12)
    assert sample["msa_row_mask"].sum() == min(rows, 6)
    assert sample["extra_msa_row_mask"].sum() == min(max(rows - 6, 0), 7)
    assert not sample["all_atom_mask"][length:].any()


def test_changing_a_sample_leaves_the_cache_alone() -> None:
    for config in (CONFIG, WHOLE):
        data = dataset(config)
        untouched = {name: tensor.clone() for name, tensor in data[0].items()}
        for tensor in data[0].values():
            tensor.zero_()
        assert_equal(data[0], untouched)


def test_cache_drops_the_least_recently_used_chain() -> None:
    chains = [make_chain(f"{i}abc", AMINO_ACIDS) for i in range(3)]
    one = load_record(MemoryStore(*chains), chains[0].key).nbytes
    data = SampleDataset(MemoryStore(*chains), [c.key for c in chains], CONFIG, 0, training=False, cache_bytes=2 * one)
    for index in (0, 1, 0, 2, 0, 1):
        data[index]
    assert data.source.reads == {"0abc_A": 1, "1abc_A": 2, "2abc_A": 1}


# Edges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", ["A", "X", "XXXXX", "GG"])
@pytest.mark.parametrize("resolved", [True, False])
def test_degenerate_chains_give_finite_samples(letters: str, resolved: bool) -> None:
    """One residue, no known residue, no atoms, one sequence: masks are zero where needed, all numbers are finite."""
    chain = make_chain("1abc", letters, resolved, resolution=None)
    for config in (CONFIG, WHOLE):
        sample = finished(SampleDataset(MemoryStore(chain, rows=1), [chain.key], config, 0, training=True)[0], config)
        assert all(tensor.isfinite().all() for tensor in sample.values())
        assert sample["resolution"] == 0
        if not resolved:
            masks = ("all_atom_mask", "backbone_affine_mask", "pseudo_beta_mask", "chi_mask", "torsion_angles_mask")
            assert not any(sample[name].any() for name in masks)
            assert not sample["rigidgroups_gt_exists"].any()


def test_collate_pads_to_the_largest() -> None:
    data = dataset(replace(WHOLE, uniform_recycling=False), training=False)
    batch = with_features(collate([data[0], data[4]]), data.config)
    samples = [finished(data[index], data.config) for index in (0, 4)]
    assert batch["aatype"].shape == (2, 4, 29)
    assert batch["msa_feat"].shape == (2, 4, 6, 29, 49)
    assert batch["resolution"].tolist() == [2.0, 2.0]
    assert batch["use_clamped_fape"].shape == (2,)
    for row, sample in enumerate(samples):
        for name, tensor in sample.items():
            assert batch[name].dtype == tensor.dtype
            corner: tuple[int | slice, ...] = (row, *(slice(size) for size in tensor.shape))
            torch.testing.assert_close(batch[name][corner], tensor, rtol=0, atol=0)
    assert batch["seq_mask"][0].sum() == 4 * 17
    assert not batch["all_atom_mask"][0, 17:].any()


def test_collate_lists_every_entry_that_exists_once() -> None:
    """Catches an entry that losses would leave out, one that they would count twice, and atoms of the other naming left out."""
    samples = [dataset(WHOLE, training=False)[i] for i in range(2)]
    samples[0]["atom14_alt_gt_exists"] = samples[0]["atom14_gt_exists"].roll(1, -1)
    batch = collate(samples)
    marks = {
        "observed_frames": batch["rigidgroups_gt_exists"],
        "observed_atoms": torch.maximum(batch["atom14_gt_exists"], batch["atom14_alt_gt_exists"]),
        "existing_atoms": batch["atom14_atom_exists"][:, 0],
        "ambiguous_residues": (batch["atom14_gt_exists"] * batch["atom14_atom_is_ambiguous"]).amax(-1),
    }
    for name, mark in marks.items():
        for listed, marked in zip(batch[name].tolist(), mark.flatten(1), strict=True):
            assert len(set(listed)) == len(listed)
            assert set(marked.nonzero().flatten().tolist()) <= set(listed), name


def test_lists_have_the_same_sizes_in_each_step() -> None:
    """Catches sizes that follow from what exists, which no recording could replay; and existing entries that are left out where
    there are more than that. A batch without labels has no lists."""
    batch = collate([dataset(training=False)[0]])
    unseen, usual, full = (
        existing_entries({name: make(value) for name, value in batch.items()})
        for make in (torch.zeros_like, torch.clone, torch.ones_like)
    )
    residues = batch["atom14_gt_exists"].shape[1]
    assert {name: x.shape[1] for name, x in unseen.items()} == listed_sizes(residues)
    assert {name: x.shape for name, x in unseen.items()} == {name: x.shape for name, x in usual.items()}
    sizes = {"observed_frames": 8, "observed_atoms": 14, "existing_atoms": 14, "ambiguous_residues": 1}
    assert {name: x.shape[1] for name, x in full.items()} == {name: n * residues for name, n in sizes.items()}
    assert existing_entries({"aatype": batch["aatype"]}) == {}


def test_collate_refuses_what_is_no_batch() -> None:
    data = dataset()
    cycles = {data.cycles_of(i): i for i in range(40)}
    with pytest.raises(ValueError, match="batch_group"):
        collate([data[cycles[1]], data[cycles[3]]])
    with pytest.raises(ValueError, match="entries"):
        collate([data[0], {"aatype": data[0]["aatype"]}])


# Prediction ----------------------------------------------------------------------------------------------------------


def test_prediction_takes_the_whole_chain_and_all_cycles() -> None:
    query = ProteinSequence("q", AMINO_ACIDS)
    sample = prediction_sample(query, [make_alignment(AMINO_ACIDS)], replace(CONFIG, crop_size=3), 0)
    assert sample["aatype"].shape == (4, 20)
    assert set(sample) == set(FEATURE_AXES)


def test_prediction_seeds_differ_and_repeat() -> None:
    query, alignments = ProteinSequence("q", AMINO_ACIDS), [make_alignment(AMINO_ACIDS, 30)]
    one, again, other = (prediction_sample(query, alignments, CONFIG, seed) for seed in (1, 1, 2))
    assert_equal(one, again)
    assert (one["msa_feat"] != other["msa_feat"]).any()


# User errors ---------------------------------------------------------------------------------------------------------


def test_a_chain_without_homologues_is_its_query_alone() -> None:
    """Catches a chain whose search found nothing ending the run."""

    class Empty(MemoryStore):
        def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
            return []

    data = SampleDataset(Empty(FIVE[0]), [FIVE[0].key], CONFIG, 0, training=False)
    assert finished(data[0], CONFIG)["msa_mask"][0].sum(0).max() == 1


def test_no_chains_is_an_error_at_once() -> None:
    with pytest.raises(UserError, match="no chains"):
        SampleDataset(MemoryStore(), [], CONFIG, 0, training=True)


def test_impossible_config_is_an_error_before_the_first_sample() -> None:
    with pytest.raises(UserError, match="msa_clusters"):
        dataset(replace(CONFIG, max_templates=6))
