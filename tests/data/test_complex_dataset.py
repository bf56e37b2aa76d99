"""Samples of complexes: from files to the loss of a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from evodsp.config import FeatureConfig, LossConfig, ModelConfig, as_multimer
from evodsp.data.records import Assembly
from evodsp.data.samples.dataset import SampleDataset, collate
from evodsp.data.samples.sample_records import ComplexRecord, Drawing
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.parsed import Parsed
from evodsp.features.batch import with_features
from evodsp.geometry.residues import UNKNOWN, encode_sequence
from evodsp.losses.permutation import with_fitting_labels
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.exchange import LocalExchange
from evodsp.parallel.testing import dense
from evodsp.rng import Draws

CONFIG = FeatureConfig(crop_size=40, msa_clusters=4, extra_msa=4, recycles=1, uniform_recycling=False)


def dataset(files: ComplexFiles, training: bool, config: FeatureConfig = CONFIG) -> SampleDataset:
    return SampleDataset(files, ["1abc"], config, seed=0, training=training)


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


@pytest.mark.parametrize("unknown", ["alignment", "sequence"])
def test_residue_types_are_those_of_the_structure(files: ComplexFiles, unknown: str) -> None:
    """Catches residue types that an alignment decides, where X stands for a letter: the labels are of the structure's."""
    complex_ = files.parsed("1abc")
    chains, msas = list(complex_.assembly.chains), list(complex_.chains)
    if unknown == "alignment":
        rows = msas[2].msa.msa.copy()
        rows[0, 4] = UNKNOWN
        msas[2] = dataclasses.replace(msas[2], msa=dataclasses.replace(msas[2].msa, msa=rows), pairing=None)
    else:
        letters = chains[2].sequence[:4] + "X" + chains[2].sequence[5:]
        chains[2] = dataclasses.replace(chains[2], sequence=letters)
        msas[2] = dataclasses.replace(msas[2], query=dataclasses.replace(msas[2].query, letters=letters))
    assembly = dataclasses.replace(complex_.assembly, chains=tuple(chains))
    whole = dataclasses.replace(CONFIG, crop_size=None)
    record = ComplexRecord.of(Parsed(assembly, tuple(msas)), {})
    sample = record.sample(Drawing(whole, Draws.root(0), 1, training=False))
    sequence = "".join(chain.sequence for chain in chains)
    assert sample["aatype"][0].tolist() == encode_sequence(sequence).tolist()
    assert sample["target_feat"][0].argmax(-1).tolist() == sample["aatype"][0].tolist()
    # The prediction has every atom that is observed, and no atoms where the structure's residue is unknown.
    assert (sample["atom14_atom_exists"][0] >= sample["atom14_gt_exists"]).all()
    assert (unknown == "sequence") == (sample["atom14_atom_exists"][0, len(chains[0]) * 2 + 4].sum() == 0)


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


def test_labels_are_those_of_the_copy_that_a_prediction_means(files: ComplexFiles) -> None:
    """Catches labels that stay in the file's order, a label that is forgotten, lists of existing atoms that leave those of
    the other copy out, and ranks that choose for themselves."""
    complex_ = files.parsed("1abc")
    own, other, third = complex_.assembly.chains
    mask = own.mask.copy()
    mask[3] = 0  # a residue that one copy lacks
    assembly = dataclasses.replace(complex_.assembly, chains=(dataclasses.replace(own, mask=mask), other, third))
    record = ComplexRecord.of(Parsed(assembly, complex_.chains), {})
    whole = dataclasses.replace(CONFIG, crop_size=None)
    batch = collate([record.sample(Drawing(whole, Draws.root(0), 1, training=False))])
    length = len(own)
    swapped = torch.cat(
        [torch.arange(length, 2 * length), torch.arange(length), torch.arange(2 * length, len(assembly))]
    )
    labels = [name for name in batch if f"copies_{name}" in batch]
    assert {"all_atom_positions", "rigidgroups_gt_frames", "atom14_gt_positions", "torsion_angles_sin_cos"} <= set(
        labels
    )
    for order in (torch.arange(len(assembly)), swapped):
        predicted = batch["all_atom_positions"][:, order] + 0.1
        found = with_fitting_labels(predicted, batch, [Draws.root(1)])
        for name in labels:
            assert torch.equal(found[name], batch[name][:, order]), name
        present = set(found["rigidgroups_gt_exists"].flatten().nonzero()[:, 0].tolist())
        assert present <= set(batch["observed_frames"][0].tolist())

    class OfAnotherRank(LocalExchange):
        def of_first(self, x: Tensor) -> Tensor:
            return torch.tensor([1, 0, 2])

    found = with_fitting_labels(batch["all_atom_positions"], batch, [Draws.root(1)], OfAnotherRank())
    assert torch.equal(found["all_atom_positions"], batch["all_atom_positions"][:, swapped])


def test_a_batch_of_complexes_with_and_without_copies(files: ComplexFiles) -> None:
    """Catches samples that do not fit into one batch, and labels of the one in the other."""
    complex_ = files.parsed("1abc")
    chains, msas = complex_.assembly.chains, complex_.chains
    assembly = Assembly("1xyz", ("A", "C"), (chains[0], chains[2]))
    single = ComplexRecord.of(Parsed(assembly, (msas[0], msas[2])), {})
    several = ComplexRecord.of(complex_, {})
    drawing = Drawing(CONFIG, Draws.root(0), 1, training=False)
    batch = collate([single.sample(drawing), several.sample(drawing)])
    assert batch["copies_entity"].tolist() == [[0, 0, 0], [1, 1, 2]]
    predicted = batch["all_atom_positions"]
    found = with_fitting_labels(predicted, batch, [Draws.root(1), Draws.root(2)])
    for name in ("all_atom_positions", "torsion_angles_mask"):
        assert torch.equal(found[name], batch[name])
    alone = collate([single.sample(drawing)])
    assert with_fitting_labels(predicted[:1], alone, [Draws.root(1)]).keys() == alone.keys()
