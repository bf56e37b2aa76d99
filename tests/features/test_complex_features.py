"""Features of complexes: what the loader hands over, and what the device makes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa, merge
from evodsp.data.complexes.pairing import PairingMsa
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import collate
from evodsp.data.samples.raw_features import Crop, complex_features, piece
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.sources.parsed import ChainMsas
from evodsp.features.batch import with_features
from evodsp.features.clusters import shared_deletions, shared_profiles, shares_of
from evodsp.geometry.residues import GAP, MASK, decode
from evodsp.model.alphafold import ARRANGEMENTS
from evodsp.rng import Draws
from tests.builders.numpy_features import by_formula

CONFIG = FeatureConfig(crop_size=20, msa_clusters=7, extra_msa=64, recycles=1, masked_msa_fraction=0.4)


def merged(*lengths: int) -> MergedMsa:
    """A complex of a chain of the first length and two copies of a chain of the second."""
    rng = np.random.default_rng(1)
    chains = []
    for length, copies in zip(lengths, (1, 2), strict=True):
        query = rng.integers(0, 20, length).astype(np.int8)
        rows = np.where(rng.random((16, length)) < 0.5, query, rng.integers(0, 22, (16, length))).astype(np.int8)
        rows[0] = query
        deletions = (rng.integers(0, 9, rows.shape) * (rng.random(rows.shape) < 0.2)).astype(np.int32)
        msa = MsaFeatures(rows, deletions, letter_profile(rows))
        keys = ("", *(f"species{k % 3}" for k in range(5)))
        pairing = PairingMsa(rows[:6], deletions[:6], keys)
        chains += [
            ChainMsas(ProteinSequence(f"{length}_{copy}", decode(query)), msa, pairing) for copy in range(copies)
        ]
    return merge(chains)


def features(msa: MergedMsa, crop: Crop, config: FeatureConfig = CONFIG) -> dict[str, Tensor]:
    found = complex_features(msa, config, Draws.root(3), config.recycles + 1, crop)
    batch = collate([{name: torch.from_numpy(values) for name, values in found.items()}])
    return {name: values[0] for name, values in with_features(batch, config).items()}


@pytest.mark.parametrize("crop", [piece(0, 16), Crop(np.array([0, 1, 4, 6, 7, 8, 12, 13]))], ids=["whole", "pieces"])
def test_clusters_and_masks_are_deepminds(crop: Crop) -> None:
    """Catches clusters of whole columns, gaps beside a block that the loss counts, and deletions of another row."""
    msa = merged(6, 5)
    found, length = features(msa, crop), len(crop)
    for cycle in range(2):
        letters = found["msa_feat"][cycle, :7, :length, :23]
        assert (letters.sum(-1) == 1).all()
        rows = int(found["extra_msa_row_mask"][cycle].sum())
        assert rows == len(msa.msa) - 7
        extra = found["extra_msa"][cycle, :rows, :length].numpy()
        own, others = (
            np.rint(3 * np.tan(x.double().numpy() * np.pi / 2))
            for x in (found["msa_feat"][cycle, :7, :length, 24], found["extra_deletion_value"][cycle, :rows, :length])
        )
        profile, mean = by_formula(letters.argmax(-1).numpy(), extra, own, others)
        np.testing.assert_allclose(found["msa_feat"][cycle, :7, :length, 25:48], profile, rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(
            found["msa_feat"][cycle, :7, :length, 48], np.arctan(mean / 3) * 2 / np.pi, rtol=2e-6, atol=1e-7
        )
        true, counted = found["true_msa"][cycle, :7, :length], found["bert_mask"][cycle, :7, :length] > 0
        rows_of = [
            int(np.flatnonzero((msa.msa[:, crop.index] == row).all(1))[0]) for row in true.numpy()
        ]  # equal rows are in one block, or paired
        covered = torch.from_numpy(msa.bert_mask()[rows_of][:, crop.index])
        assert not (counted & ~covered).any()
        changed = letters.argmax(-1) != true
        assert (changed & covered & ~counted).sum() == 0
        assert (changed & ~covered).any()
        assert counted.any()


def test_numbers_of_chains_and_what_the_model_reads() -> None:
    """Catches chains that are numbered on, padding that belongs to a chain, and a feature that the model misses."""
    found = features(merged(6, 5), piece(0, 16))
    assert found["asym_id"][0].tolist() == [1] * 6 + [2] * 5 + [3] * 5 + [0] * 4
    assert found["entity_id"][1].tolist() == [1] * 6 + [2] * 10 + [0] * 4
    assert found["sym_id"][0].tolist() == [1] * 11 + [2] * 5 + [0] * 4
    assert found["residue_index"][0].tolist() == [*range(6), *range(5), *range(5), 0, 0, 0, 0]
    assert found["target_feat"].shape == (2, 20, 21)
    assert torch.equal(found["target_feat"][0, :16].argmax(-1), found["aatype"][0, :16].long())
    assert not found["target_feat"][0, 16:].any()
    assert set(ARRANGEMENTS["multimer"].features) <= set(found)
    assert "msa_blocks" not in found


def test_rows_of_a_sequence_outside_the_crop_are_left_out() -> None:
    """Catches cluster centres of gaps only."""
    msa = merged(6, 5)
    found = features(msa, piece(6, 8), dataclasses.replace(CONFIG, msa_clusters=40))
    rows = int(found["msa_row_mask"][0].sum())
    assert rows == int((msa.block != 1).sum())
    unpaired = found["true_msa"][0, :rows, :8] != GAP
    assert unpaired.any(1).all()
    assert found["asym_id"][0].tolist() == [2] * 5 + [3] * 3 + [0] * 12


# Clusters as AlphaFold-Multimer makes them, against its formula, written out.


def drawn(kinds: int, extra: int) -> tuple[np.ndarray, ...]:
    """Centres with masked letters, extra sequences with gaps, and deletions. Few `kinds` of letters make many ties."""
    rng = np.random.default_rng(kinds)
    centres = rng.integers(0, kinds, (6, 9))
    rows = rng.integers(0, kinds, (extra, 9))
    centres[rng.random(centres.shape) < 0.2] = MASK
    rows[rng.random(rows.shape) < 0.3] = GAP
    rows[: extra // 4] = GAP  # they agree with no centre
    numbers = [rng.integers(0, 5, x.shape) * (rng.random(x.shape) < 0.3) for x in (centres, rows)]
    return centres, rows, *numbers


@pytest.mark.parametrize(("kinds", "extra"), [(2, 40), (5, 40), (21, 40), (3, 0), (2, 3000)])
def test_clusters_are_deepminds(kinds: int, extra: int) -> None:
    """Catches ties that go to one cluster, sequences without agreement that belong to none, the centre's weight for all, and
    letters that count where they are gaps or masked."""
    centres, rows, of_centres, numbers = drawn(kinds, extra)
    profile, mean = by_formula(centres, rows, of_centres, numbers)
    ours, others = torch.from_numpy(centres).to(torch.int8), torch.from_numpy(rows).to(torch.int8)
    shares = shares_of(ours, others)
    found = shared_profiles(ours, others, shares, residues=9)
    np.testing.assert_allclose(found.numpy(), profile, rtol=2e-6, atol=1e-7)
    row, column = np.nonzero(numbers)
    cells = (torch.from_numpy(x) for x in (row, column, numbers[row, column].astype(np.int32)))
    means = shared_deletions(torch.from_numpy(of_centres).float(), *cells, shares, len(rows), residues=9)
    np.testing.assert_allclose(means.numpy(), mean, rtol=2e-6, atol=1e-7)


def test_sums_do_not_depend_on_their_order() -> None:
    """Catches sums that are rounded: ranks whose GPUs add in different orders would have different features."""
    centres, rows, _, _ = drawn(2, 3000)
    ours = torch.from_numpy(centres).to(torch.int8)
    order = np.random.default_rng(1).permutation(len(rows))
    both = [torch.from_numpy(x).to(torch.int8) for x in (rows, rows[order])]
    shares = [shares_of(ours, some) for some in both]
    assert torch.equal(shares[0].sizes, shares[1].sizes)
    profiles = [shared_profiles(ours, some, own, residues=9) for some, own in zip(both, shares, strict=True)]
    assert torch.equal(*profiles)
