"""Samples of complexes: from files to the loss of a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from evodsp.config import FeatureConfig, LossConfig, ModelConfig, as_multimer
from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.samples.complex_dataset import ComplexDataset
from evodsp.data.samples.dataset import collate
from evodsp.features.batch import with_features
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from tests.builders.complex_files import write_complex
from tests.builders.parameters import dense

CONFIG = FeatureConfig(crop_size=40, msa_clusters=4, extra_msa=4, recycles=1, uniform_recycling=False)


@pytest.fixture
def files(tmp_path: Path) -> ComplexFiles:
    return ComplexFiles(*write_complex(tmp_path))


def dataset(files: ComplexFiles, training: bool, config: FeatureConfig = CONFIG) -> ComplexDataset:
    return ComplexDataset(files, ["1abc"], config, seed=0, training=training)


def test_labels_are_those_of_the_residues_of_the_crop(files: ComplexFiles) -> None:
    """Catches labels of another chain, of residues outside of the crop, and chains in another order than the columns."""
    chains = files.parsed("1abc").assembly.chains
    data, kinds = dataset(files, training=True), set()
    for index in range(8):
        sample = data[index]
        chain, residue = sample["asym_id"][0], sample["residue_index"][0]
        kinds.add(tuple(torch.unique(chain).tolist()))
        for place in range(40):
            source = chains[int(chain[place]) - 1]
            expected = torch.from_numpy(source.positions[int(residue[place])])
            assert torch.equal(sample["all_atom_positions"][place], expected)
    assert len(kinds) > 1, "all crops show the same chains"


def test_samples_depend_on_their_number_alone(files: ComplexFiles) -> None:
    """Catches a crop that is drawn from the process's random numbers, and one that all samples share."""
    one, other = dataset(files, training=True), dataset(files, training=True)
    last = one[5]
    for index in (5, 3):
        found = other[index]
        same = all(torch.equal(found[name], last[name]) for name in ("asym_id", "residue_index"))
        assert same == (index == 5)
    first, again = dataset(files, training=False)[0], dataset(files, training=False)[0]
    assert torch.equal(first["residue_index"], again["residue_index"])


def test_a_model_learns_from_a_complex(files: ComplexFiles) -> None:
    """Catches a feature or a label of complexes that the model or a term of its loss lacks, and parameters without gradient."""
    config = as_multimer(ModelConfig.preset("test"))
    model = dense(AlphaFold(config)).float()
    batch = with_features(collate([dataset(files, training=True)[index] for index in (0, 1)]), CONFIG)
    output = model(batch)
    extra = dict.fromkeys(("interface_fape", "chain_centre", "violation", "pae", "experimentally_resolved"), 0.5)
    weights = dataclasses.replace(LossConfig(), **extra)
    loss, terms = total_loss(output, batch, weights, config.heads)
    assert {"interface_fape", "chain_centre", "backbone_fape"} <= terms.keys()
    assert all(value.isfinite() for value in terms.values())
    assert terms["interface_fape"] > 0
    loss.backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert all(name.startswith("extra_msa_stack.blocks.0.msa_stack.") for name in unused)
    assert not any("outer_product_mean" in name for name in unused)
