"""Recycling in the whole model: ensembles of feature sets, and early stopping when the structure has converged."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import ARRANGEMENTS, FEATURES, AlphaFold, Recycled, ca_change
from evodsp.model.heads import ModelOutput
from evodsp.rng import Draws
from tests.builders.host_waits import HostWaits
from tests.builders.parameters import noisy
from tests.builders.small_model import config, features

BATCH, CLUSTERS, EXTRA, RESIDUES = 2, 5, 4, 7  # all sizes differ


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    """A model with random parameters. With AF2's initial zeros, all feature sets would give the same output."""
    torch.manual_seed(0)
    return noisy(AlphaFold(ModelConfig.preset("test"))).eval()


def make_batch(sets: int) -> dict[str, Tensor]:
    """Random features. The second sample has two residues of padding and an unknown residue X."""
    draw = torch.Generator().manual_seed(1)
    axes = (BATCH, sets)
    seq_mask = torch.ones(*axes, RESIDUES)
    seq_mask[1, :, -2:] = 0
    aatype = torch.randint(20, (BATCH, 1, RESIDUES), generator=draw).expand(*axes, RESIDUES).clone()
    aatype[1, :, 2] = 20
    msa_mask = torch.ones(*axes, CLUSTERS, RESIDUES) * seq_mask.unsqueeze(-2)
    extra_mask = torch.ones(*axes, EXTRA, RESIDUES) * seq_mask.unsqueeze(-2)
    return {
        "aatype": aatype.int(),
        "residue_index": torch.arange(RESIDUES).expand(*axes, -1).int(),
        "seq_mask": seq_mask,
        "target_feat": torch.randn(*axes, RESIDUES, 22, generator=draw),
        "msa_feat": torch.randn(*axes, CLUSTERS, RESIDUES, 49, generator=draw),
        "msa_mask": msa_mask,
        "extra_msa": torch.randint(23, (*axes, EXTRA, RESIDUES), generator=draw).int(),
        "extra_msa_mask": extra_mask,
        "extra_has_deletion": torch.rand(*axes, EXTRA, RESIDUES, generator=draw).round(),
        "extra_deletion_value": torch.rand(*axes, EXTRA, RESIDUES, generator=draw),
    }


def entry(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """One feature set of the batch."""
    return {name: batch[name][:, number] for name in FEATURES}


def tensors(output: ModelOutput) -> dict[str, Tensor]:
    structure = {"atom14": output.structure.atom14, "positions": output.structure.positions}
    return {**output.representations, **output.logits, **structure}


def check_same_bits(a: ModelOutput, b: ModelOutput) -> None:
    for name, value in tensors(a).items():
        assert torch.equal(value, tensors(b)[name]), name


def check_close(a: ModelOutput, b: ModelOutput) -> None:
    for name, value in tensors(a).items():
        torch.testing.assert_close(value, tensors(b)[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def pass_by_hand(model: AlphaFold, members: list[dict[str, Tensor]], recycled: Recycled) -> ModelOutput:
    """Algorithm 2 with the average written out.

    Averages the pair representation, the first MSA row and the single representation; the MSA is the first set's.
    """
    found = [model.representations(member, recycled) for member in members]
    pair = torch.stack([z for _, z in found]).mean(0)
    single = torch.stack([model.single(m[:, 0]) for m, _ in found]).mean(0)
    structure = model.structure_module(single, pair, members[0]["aatype"], members[0]["seq_mask"])
    row = torch.stack([m[:, 0] for m, _ in found]).mean(0)
    logits = {
        "distogram": model.heads["distogram"](pair),
        "masked_msa": model.heads["masked_msa"](found[0][0]),
        "plddt": model.heads["plddt"](structure.single),
    }
    return ModelOutput({"msa": found[0][0], "first_row": row, "pair": pair, "single": single}, structure, logits)


@pytest.mark.parametrize("ensembles", [2, 3])
def test_ensembling_is_the_average_by_hand(model, ensembles):
    """Catches feature sets of another pass, an averaged MSA, and a recycled first row that comes from one set only."""
    batch = make_batch(2 * ensembles)
    zeros = [torch.zeros(BATCH, RESIDUES, 12), torch.zeros(BATCH, RESIDUES, RESIDUES, 10)]
    recycled = Recycled(*zeros, torch.zeros(BATCH, RESIDUES, 37, 3))
    first = pass_by_hand(model, [entry(batch, n) for n in range(ensembles)], recycled)
    second = pass_by_hand(model, [entry(batch, n) for n in range(ensembles, 2 * ensembles)], Recycled.of(first))
    with torch.no_grad():
        output = model(batch, ensembles=ensembles)
    check_close(output, second)
    assert (output.representations["first_row"] - output.representations["msa"][:, 0]).abs().max() > 1e-3, (
        "the sets must differ, or the average would go untested"
    )


def test_an_ensemble_of_one_changes_nothing(model):
    """Catches an ensemble of one that changes bits, and several equal sets that change the output."""
    batch = make_batch(2)
    with torch.no_grad():
        output = model(batch)
        check_same_bits(model(batch, ensembles=1), output)
        twice = {name: values.repeat_interleave(2, 1) for name, values in batch.items()}
        check_close(model(twice, ensembles=2), output)
    assert torch.equal(output.representations["first_row"], output.representations["msa"][:, 0])
    assert torch.equal(output.representations["single"], model.single(output.representations["first_row"]))


def test_sets_of_one_pass_drop_out_differently(model):
    """Catches one dropout mask for all sets of a pass. The first set must keep the mask that it has without an ensemble."""
    batch = make_batch(1)
    twice = {name: values.repeat_interleave(2, 1) for name, values in batch.items()}
    draws = [Draws.root(3).at("sample", n) for n in range(BATCH)]
    with torch.no_grad():
        one, two = model(batch, draws), model(twice, draws, ensembles=2)
    assert torch.equal(one.representations["msa"], two.representations["msa"])
    assert not torch.allclose(one.representations["pair"], two.representations["pair"], atol=1e-4)


def test_a_batch_that_does_not_hold_whole_passes(model):
    """Catches a feature set that is dropped silently, when three sets are given for passes of two."""
    with pytest.raises(ValueError, match="3 feature sets does not hold passes of 2"):
        model(make_batch(3), ensembles=2)


def test_a_missing_feature_is_named(model):
    """Catches a KeyError for a batch that lacks a feature."""
    batch = make_batch(1)
    del batch["extra_msa"]
    with pytest.raises(UserError, match="lacks the features extra_msa;"):
        model(batch)


def test_gradients_flow_through_every_set_of_the_last_pass_only(model):
    """Catches a set of the last pass without gradient, and gradients through an earlier pass."""
    batch = make_batch(4)
    for name in ("msa_feat", "target_feat"):
        batch[name].requires_grad_()
    model(batch, ensembles=2).structure.atom14.square().sum().backward()
    for name in ("msa_feat", "target_feat"):
        norms = batch[name].grad.flatten(2).norm(dim=-1)[0]
        assert norms[:2].tolist() == [0, 0]
        assert (norms[2:] > 0).all()


def changes(model: AlphaFold, batch: dict[str, Tensor], passes: int) -> tuple[list[ModelOutput], list[Tensor]]:
    """Outputs after 1, 2, … passes without early stopping, and the change of CA-CA distances from each to the next."""
    with torch.no_grad():
        outputs = [model({k: v[:, :n] for k, v in batch.items()}) for n in range(1, passes + 1)]
    found = []
    for before, after in pairwise(outputs):
        change = []
        for sample in range(BATCH):
            resolved = (batch["seq_mask"][sample, 0] > 0) & (batch["aatype"][sample, 0] < 20)
            old, new = (o.structure.positions[sample, resolved, 1].double() for o in (before, after))
            difference = [
                [float((a - b).norm() - (c - d).norm()) for b, d in zip(new, old, strict=True)]
                for a, c in zip(new, old, strict=True)
            ]
            change.append(torch.tensor(difference).square().mean().sqrt())
        found.append(torch.stack(change))
    return outputs, found


@pytest.fixture(scope="module")
def passes(model) -> tuple[dict[str, Tensor], list[ModelOutput], list[Tensor]]:
    """A batch of five passes, the output of each, and the changes between them."""
    batch = make_batch(5)
    return batch, *changes(model, batch, 5)


def test_recycling_ends_at_the_right_pass(model, passes):
    """Catches recycling that stops before BOTH samples have converged or later, and the output of another pass."""
    batch, outputs, steps = passes
    largest = [float(step.max()) for step in steps]
    assert float(steps[0].min()) < largest[0], "the samples must differ, or stopping for one of them would go unseen"
    for number, tolerance in enumerate(largest, start=1):
        expected = next(n for n, value in enumerate(largest, start=1) if value <= 1.001 * tolerance)
        with torch.no_grad():
            output = model(batch, stop_tolerance=1.001 * tolerance)
        check_same_bits(output, outputs[expected])
        torch.testing.assert_close(output.ca_change, steps[expected - 1], rtol=1e-4, atol=1e-5)
        assert expected <= number


def test_multimer_runs_one_more_pass_than_settles(model, passes, monkeypatch: pytest.MonkeyPatch):
    """Catches a result of the pass that has settled, where AlphaFold-Multimer's code runs another, and a pass too many."""
    batch, outputs, steps = passes
    largest = [float(step.max()) for step in steps]
    monkeypatch.setattr(model, "arrangement", ARRANGEMENTS["multimer"])
    for tolerance in largest:
        settles = next(n for n, value in enumerate(largest, start=1) if value <= 1.001 * tolerance)
        with torch.no_grad():
            found = model(batch, stop_tolerance=1.001 * tolerance)
        check_same_bits(found, outputs[min(settles + 1, 4)])


def test_without_a_tolerance_nothing_changes(model):
    """Catches a tolerance of 0, or one that is never met, that changes bits or stops early. One pass reports no change."""
    batch = make_batch(3)
    with torch.no_grad():
        output = model(batch)
        check_same_bits(model(batch, stop_tolerance=0.0), output)
        assert output.ca_change is None
        unmet = model(batch, stop_tolerance=1e-9)
        check_same_bits(unmet, output)
        assert unmet.ca_change is not None
        assert model(make_batch(1), stop_tolerance=1e6).ca_change is None


def test_ca_change_is_of_distances():
    """Catches a dependence on rotation, translation or masked residues, and rounding errors far from the origin."""
    draw = torch.Generator().manual_seed(2)
    points = 100 * torch.randn(1, 60, 3, generator=draw)
    mask = torch.ones(1, 60)
    turned = points[..., [1, 2, 0]] + torch.tensor([300.0, 0.0, -20.0])
    assert ca_change(turned, points, mask).item() < 1e-3
    assert ca_change(points.clone(), points, mask).item() == 0
    moved = points.clone()
    moved[0, 7] += 50
    mask[0, 7] = 0
    assert ca_change(moved, points, mask).item() == 0
    assert ca_change(moved, points, torch.zeros(1, 60)).item() == 0


def test_an_output_is_a_tree_of_tensors(model):
    """Catches a record that FSDP2 of torch before 2.13 does not look into: it never gathered the heads' parameters again."""
    with torch.no_grad():
        output = model(make_batch(1))
    leaves, structure = torch.utils._pytree.tree_flatten(output)
    inside = [output.structure.backbone.rotation, output.structure.frames.translation, *tensors(output).values()]
    assert {id(x) for x in inside} <= {id(leaf) for leaf in leaves}
    check_same_bits(torch.utils._pytree.tree_unflatten(leaves, structure), output)


def test_nothing_large_outlives_its_use(model):
    """Catches logits kept during the next pass and an extra MSA kept during the Evoformer: gigabytes for 1,000 residues."""
    large: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    keep = [
        module.register_forward_hook(lambda _, inputs, output: large.append(weakref.ref(output)))
        for module in (model.extra_msa_embedder, model.heads["distogram"], model.heads["masked_msa"])
    ]
    keep.append(
        model.extra_msa_stack.register_forward_hook(lambda _, inputs, output: large.append(weakref.ref(output[0])))
    )
    keep.append(model.evoformer.register_forward_pre_hook(lambda *_: alive.append(sum(x() is not None for x in large))))
    try:
        with torch.no_grad():
            model(make_batch(3))
    finally:
        for handle in keep:
            handle.remove()
    assert alive == [0, 0, 0]
    assert len(large) == 12


def test_features_of_a_pass_come_to_the_device_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches features on another device than the model, and features of a pass that stay on its device in the next."""
    model = AlphaFold(ModelConfig.preset("test")).to("meta")
    run, present = model.one_pass, []
    seen: list[weakref.ref[Tensor]] = []

    def one_pass(members: list[dict[str, Tensor]], *arguments: Any) -> ModelOutput:
        present.append(sum(x() is not None for x in seen))
        seen.extend(weakref.ref(x) for x in members[0].values())
        assert {x.device.type for x in members[0].values()} == {"meta"}
        return run(members, *arguments)

    monkeypatch.setattr(model, "one_pass", one_pass)
    with torch.no_grad():
        output = model(make_batch(3))
    assert output.structure.positions.device.type == "meta"
    assert present == [0, 0, 0]


def test_a_pass_with_templates_and_dropout_does_not_wait() -> None:
    """Catches constants, lists of atom slots and edges of bins that are copied to the device in every pass."""
    model = AlphaFold(config()).to("meta")
    batch = {
        name: value.to("meta", torch.float32 if value.is_floating_point() else None)
        for name, value in features(1).items()
    }
    model(batch)  # constants are copied in the first pass
    with HostWaits() as seen:
        output = model(batch, [Draws.root(0)])
        (output.structure.positions.sum() + output.representations["pair"].sum()).backward()
    # The keys of dropout, once a pass: from pinned memory on a GPU, so that the host does not wait.
    assert [wait for wait in seen.waits if not wait.startswith("_to_copy model/dropout.py")] == []
