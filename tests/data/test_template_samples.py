"""Template features of samples: real files, crop and padding, draws by (seed, index), no leakage."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.samples.dataset import SampleDataset, collate, load_record
from evodsp.data.samples.raw_features import TEMPLATE_AXES, piece
from evodsp.data.samples.sample_records import draw_templates
from evodsp.data.templates.hits import TemplateHit
from evodsp.data.templates.source import TemplateSource
from evodsp.features.batch import prediction_sample
from evodsp.geometry.residues import encode_sequence
from evodsp.rng import Draws
from tests.builders.alignments import make_alignment
from tests.builders.chains import AMINO_ACIDS, MemoryStore, make_chain, straight_chain
from tests.builders.finished import made
from tests.builders.templates import MemoryStructures, from_raw, make_hit, random_templates
from tests.shared import load

CONFIG = FeatureConfig(crop_size=12, msa_clusters=6, extra_msa=7, recycles=3)
WITH = replace(CONFIG, max_templates=4, recycles=1)
WHOLE = replace(WITH, crop_size=None)


# Real files ------------------------------------------------------------------------------------------------------------


def test_golden_features(golden: Path) -> None:
    """Catches a crop, padding or type of template features other than AF2's, bit for bit, from the whole chain's raw ones."""
    full, processed = load(golden / "features_raw_full.npz"), load(golden / "features_processed.npz")
    letters = full["sequence"][0].decode()
    config = FeatureConfig(msa_clusters=32, extra_msa=64, max_templates=4, crop_size=72, recycles=1)
    templates = from_raw(full)
    msa = load_record(MemoryStore(make_chain("1abc", letters)), "1abc_A").msa
    aatype = load_record(MemoryStore(make_chain("1abc", letters)), "1abc_A").aatype
    features = made(aatype, msa, replace(config, crop_size=None), Draws.root(0), 2, piece(40, 64), templates)
    for name in TEMPLATE_AXES:
        assert features[name].dtype == processed[name].dtype
        residues = TEMPLATE_AXES[name].index("residues") + 1 if "residues" in TEMPLATE_AXES[name] else None
        expected = processed[name] if residues is None else processed[name].take(range(64), axis=residues)
        np.testing.assert_array_equal(features[name], expected, err_msg=name)


# Sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [None, 0, 1, 4, 6])
def test_at_most_max_templates(number: int | None) -> None:
    """Catches missing entries of a chain without templates, and absent templates, which a prediction would compute in vain."""
    templates = None if number is None else random_templates(number, len(AMINO_ACIDS))
    sample = prediction_sample(ProteinSequence("q", AMINO_ACIDS), [make_alignment(AMINO_ACIDS)], WHOLE, 0, templates)
    there = min(number or 0, 4)
    assert sample["template_mask"].tolist() == [[1] * there] * 2
    for name, axes in TEMPLATE_AXES.items():
        sizes = [{"templates": there, "residues": len(AMINO_ACIDS)}.get(axis) for axis in axes if axis]
        assert list(sample[name].shape[1 : 1 + len(sizes)]) == sizes
    assert sample["template_sum_probs"][0, :, 0].tolist() == list(range(number or 0, 0, -1))[:4]


class Searched(MemoryStore):
    """Chains in memory, each with a given number of template hits that cover it; `structures` has their structures."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(*(make_chain(f"{k}abc", (AMINO_ACIDS * 2)[k : k + 18 + 5 * k]) for k in range(len(numbers))))
        self.number_of = dict(zip(self.chains, numbers, strict=True))
        self.found = {
            f"{chain.pdb_id[0]}t{k:02}_A": straight_chain(other_letters(chain.sequence), f"{chain.pdb_id[0]}t{k:02}_A")
            for chain in self.chains.values()
            for k in range(self.number_of[chain.key])
        }
        self.structures = MemoryStructures(
            *self.found.values(), dates={key[:4]: date(2001, 1, 1) for key in self.found}
        )

    def chain(self, key: str) -> Chain:
        return replace(self.chains[key], release_date=date(2020, 1, 1))

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        numbers = range(self.number_of[key])
        letters = other_letters(query.letters)
        return [make_hit(query.letters, letters, key=f"{key[0]}t{k:02}_A", score=50.0 - k) for k in numbers]

    def dataset(self, config: FeatureConfig, training: bool, seed: int = 0) -> SampleDataset:
        templates = TemplateSource(self.structures)
        return SampleDataset(self, list(self.chains), config, seed, training, templates=templates)


def other_letters(letters: str) -> str:
    """A different sequence of the same length: a hit equal to the query is rejected."""
    return letters.translate(str.maketrans(AMINO_ACIDS, AMINO_ACIDS[1:] + AMINO_ACIDS[0]))


def test_templates_are_cropped_with_their_residues() -> None:
    """Catches templates shifted against the cropped sequence: their residue i has its CA at x = 3.8 i."""
    data = Searched(0, 4, 4, 4).dataset(WITH, training=True)
    checked = 0
    for index in range(24):
        sample = data[index]
        there = int(sample["template_mask"][0].sum())
        x = sample["template_all_atom_positions"][:, :there, :, 1, 0] / 3.8
        torch.testing.assert_close(x.round().int(), sample["residue_index"][:, None].expand(-1, there, -1))
        # The templates have the next letter of the alphabet (`other_letters`).
        order = torch.tensor(encode_sequence(AMINO_ACIDS[1:] + AMINO_ACIDS[0]))[encode_sequence(AMINO_ACIDS).argsort()]
        expected = order[sample["aatype"][:, None].expand(-1, there, -1).long()]
        torch.testing.assert_close(sample["template_aatype"][:, :there], expected.int())
        checked += there * (int(sample["residue_index"][0, 0]) > 0)
    assert checked > 5, "no crop began inside its chain"


def test_validation_takes_the_best() -> None:
    """Catches random templates in validation, whose results are compared between epochs, and templates that the cache does not
    count."""
    data = Searched(6, 2).dataset(WHOLE, training=False)
    with_, without = (load_record(data.source, data.keys[0], source) for source in (data.templates, None))
    assert with_.templates is not None
    assert with_.nbytes - without.nbytes == with_.templates.features.nbytes > 0
    assert data[0]["template_sum_probs"][0, :, 0].tolist() == [50, 49, 48, 47]
    assert data[1]["template_sum_probs"][0, :, 0].tolist() == [50, 49, 0, 0]


def test_samples_with_different_numbers_of_templates_make_a_batch() -> None:
    """Catches entries or axes that differ between chains with many, few and no templates, and chains of other lengths."""
    data = Searched(6, 0, 1).dataset(WHOLE, training=False)
    batch = collate([data[index] for index in range(3)])
    assert batch["template_mask"][:, 0].tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert batch["template_all_atom_positions"].shape == (3, 1, 4, 28, 37, 3)
    assert not batch["template_all_atom_masks"][0, :, :, 18:].any()


def test_templates_are_a_function_of_seed_and_index() -> None:
    """Catches draws that depend on earlier reads or on the worker, or that do not change at all."""
    one, two, other = (Searched(9, 5).dataset(WITH, training=True, seed=seed) for seed in (1, 1, 2))
    indices = range(12)
    two[5]
    scores = [one[index]["template_sum_probs"][0, :, 0].tolist() for index in indices]
    assert [
        pickle.loads(pickle.dumps(two))[index]["template_sum_probs"][0, :, 0].tolist() for index in indices
    ] == scores
    assert [other[index]["template_sum_probs"][0, :, 0].tolist() for index in indices] != scores
    assert len({tuple(row) for row in scores}) > 6


# Draws -----------------------------------------------------------------------------------------------------------------


def test_draws_are_the_supplements() -> None:
    """min(k, 4) templates with k uniform in 0..n, whatever their score: catches a preference for the best ones, a number
    that is never drawn, and repeated templates."""
    templates, samples = random_templates(7, 5), 1000
    drawn = [draw_templates(templates, 4, Draws.root(3).at(index)).names for index in range(samples)]
    numbers = np.bincount([len(names) for names in drawn]) / samples
    np.testing.assert_allclose(numbers, [1 / 8, 1 / 8, 1 / 8, 1 / 8, 4 / 8], atol=0.05)
    assert all(len(set(names)) == len(names) for names in drawn)
    each = Counter(name for names in drawn for name in names)
    mean = numbers @ np.arange(5) / 7
    np.testing.assert_allclose([each[name] / samples for name in templates.names], mean, atol=0.05)
    assert draw_templates(random_templates(0, 5), 4, Draws.root(0)).names == ()
    assert len(draw_templates(templates, 2, Draws.root(1)).names) <= 2
