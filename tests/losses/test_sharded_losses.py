"""Losses and confidence measures over several ranks against one device: values, breakdown and gradients, in float64.

Sizes do not divide, all masks have zeros, every term is on. Logits of pairs and of the MSA are sharded; every rank
holds all other outputs in full. The mean of the ranks' losses is the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.config import LossConfig
from evodsp.data.samples.dataset import existing_entries
from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import LETTERS_WITH_GAP
from evodsp.losses import structure
from evodsp.losses.structure import sidechain_fape
from evodsp.losses.total import CHAIN, TERMS, RecordedLoss, total_loss
from evodsp.losses.violation import find_violations
from evodsp.metrics import lddt_ca
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.heads import compute_pae, compute_ptm
from evodsp.model.recordings import Rerun
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, Ledger
from tests.builders.comparison import TOLERANCE, close
from tests.builders.host_waits import HostWaits
from tests.builders.labelled_batch import (
    CHAIN_WEIGHTS,
    CLUSTERS,
    HEADS,
    ITERATIONS,
    RESIDUES,
    WEIGHTS,
    Source,
    Tensors,
    batch_of,
    leaves_of,
    output_of,
)
from tests.ranks import RankPool

SHARDED = {"distogram_logits": 1, "predicted_aligned_error_logits": 1, "masked_msa_logits": 2}
"""Sharded outputs and the axis they are sharded along."""


@dataclass(frozen=True)
class Result:
    loss: Tensor
    breakdown: Tensors
    gradients: Tensors


def shards(leaves: Tensors, exchange: Exchange) -> Tensors:
    """The leaves that this rank holds: shards of some outputs, the others in full. They require gradients."""
    sharded = {name: leaves[name].movedim(dim, 0) for name, dim in SHARDED.items()}
    local = {name: x[exchange.owned(len(x))].movedim(0, SHARDED[name]) for name, x in sharded.items()}
    return {name: x.clone().requires_grad_() for name, x in {**leaves, **local}.items()}


def compute(samples: int, exchange: Exchange, listed: bool = False, chains: bool = False) -> Result:
    """Loss, breakdown and gradients on one rank. `listed`: with the lists of existing entries that `collate` adds. `chains`:
    of complexes, with their terms and letters."""
    whole, batch = leaves_of(samples), batch_of(samples, chains=chains)
    if chains:
        whole["masked_msa_logits"] = whole["masked_msa_logits"][..., :LETTERS_WITH_GAP]
    if listed:
        batch |= existing_entries(batch)
    leaves, weights = shards(whole, exchange), CHAIN_WEIGHTS if chains else WEIGHTS
    loss, breakdown = total_loss(output_of(leaves, exchange), batch, weights, HEADS, exchange)
    loss.backward()
    gradients = {name: x.new_zeros(x.shape) if x.grad is None else x.grad for name, x in leaves.items()}
    return Result(loss.detach(), breakdown, gradients)


def loss_on_rank(group: Group, samples: int, chains: bool) -> Result:
    return compute(samples, ShardedExchange(Group(group)), listed=samples > 1, chains=chains)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("chains", [False, True])
def test_total_loss_is_that_of_one_device(pool: RankPool, ranks: int, samples: int, chains: bool) -> None:
    """Catches a rank-local denominator, a replicated term counted N times, a sharded term counted once, and lost pairs.

    Two samples have lists of existing entries on the ranks, not on one device: an entry that a list lacks would show.
    """
    serial = compute(samples, LocalExchange(), chains=chains)
    parts = pool.run(ranks, loss_on_rank, samples, chains)

    close(torch.stack([part.loss for part in parts]).mean(), serial.loss, "loss")
    terms = [name for name in TERMS if chains or CHAIN not in TERMS[name].features]
    assert list(serial.breakdown) == [*terms, "total"]
    for name, value in serial.breakdown.items():
        assert value > 0, name
        close(torch.stack([part.breakdown[name] for part in parts]).mean(), value, name)
    for name, gradient in serial.gradients.items():
        found = [part.gradients[name] for part in parts]
        if name in SHARDED:
            close(torch.cat(found, SHARDED[name]) / ranks, gradient, name)
        else:
            close(torch.stack(found).mean(0), gradient, name)
        assert gradient.abs().max() > 0 or name == "positions", name


@pytest.mark.parametrize(("chains", "weights"), [(False, WEIGHTS), (True, CHAIN_WEIGHTS)])
def test_a_batch_is_the_mean_of_its_samples(chains: bool, weights: LossConfig) -> None:
    """Catches terms pooled over the batch: each sample has its own masks, length, resolution and clamping."""
    leaves, batch = leaves_of(2), batch_of(2, chains=chains)
    leaves["masked_msa_logits"] = leaves["masked_msa_logits"][..., :LETTERS_WITH_GAP]
    batch["true_msa"] = batch["true_msa"].clamp(max=LETTERS_WITH_GAP - 1)
    batch["resolution"][1] += 5
    found = []
    for here in (slice(0, 2), slice(0, 1), slice(1, 2)):
        axes = {name: (slice(None), here) if x.shape[:2] == (ITERATIONS, 2) else here for name, x in leaves.items()}
        output = output_of({name: x[axes[name]] for name, x in leaves.items()}, LocalExchange())
        found.append(total_loss(output, {name: x[here] for name, x in batch.items()}, weights, HEADS)[1])
    both, *singles = found
    for name, value in both.items():
        close(value, sum(single[name] for single in singles) / 2, name)


@pytest.mark.parametrize(("term", "head"), [("plddt", "plddt"), ("pae", "predicted_aligned_error")])
def test_confidence_does_not_move_the_structure(term: str, head: str) -> None:
    """Catches a confidence that is improved by other coordinates or frames."""
    leaves = shards(leaves_of(1), LocalExchange())
    weights = LossConfig(**{**dict.fromkeys(TERMS, 0.0), term: 1.0})
    total_loss(output_of(leaves, LocalExchange()), batch_of(1), weights, HEADS)[0].backward()
    moved = [name for name, x in leaves.items() if x.grad is not None and x.grad.abs().max() > 0]
    assert moved == [f"{head}_logits"]


def traffic_on_rank(group: Group) -> list[tuple[str, int]]:
    ledger = Ledger()
    compute(2, ShardedExchange(Group(group, ledger)))
    return [(entry.kind, entry.elements) for entry in ledger.entries]


def test_losses_communicate_the_naming_alone(pool: RankPool) -> None:
    """Catches losses that communicate sums or denominators: only the choice of atom names needs a gather."""
    gather = ("all-gather", 2 * 4 * 2)  # two samples; the shards of 4 and 3 residues are padded to 4 each
    assert pool.run(2, traffic_on_rank) == [[gather]] * 2


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created. Views of `given` do not count."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.elements = 0
        self._given = {x.untyped_storage().data_ptr() for x in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._given:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


def largest(exchange: Exchange, term: str, residues: int) -> int:
    """Elements of the largest tensor created by one loss term, forward and backward, if all rows are computed at once."""
    chains = CHAIN in TERMS[term].features
    leaves, batch = shards(leaves_of(1, residues), exchange), batch_of(1, residues, chains)
    output = output_of(leaves, exchange)
    weights = dict.fromkeys(TERMS, 0.0)
    all_at_once = mock.patch.object(structure, "CPU_PAIRS", 1 << 40)
    with all_at_once, Largest([*leaves.values(), *batch.values()]) as seen:
        total_loss(output, batch, LossConfig(**{**weights, term: 1.0}), HEADS, exchange)[0].backward()
    return seen.elements


def largest_on_rank(group: Group, term: str, residues: int) -> int:
    return largest(ShardedExchange(Group(group)), term, residues)


@pytest.mark.parametrize(
    ("term", "residues"),
    [
        ("distogram", 64), ("pae", 64), ("masked_msa", 64), ("backbone_fape", 64), ("sidechain_fape", 64),
        ("violation", 64), ("plddt", 256), ("interface_fape", 64),
    ],
)  # fmt: skip
def test_no_rank_holds_anything_of_all_pairs(pool: RankPool, term: str, residues: int) -> None:
    """Catches targets, errors or distances that are computed for all pairs and sharded afterwards."""
    full = largest(LocalExchange(), term, residues)
    # One device does hold all pairs (or all letters); otherwise the bound below would prove nothing.
    assert full >= (residues**2 if term != "masked_msa" else CLUSTERS * residues * 23)
    assert max(pool.run(4, largest_on_rank, term, residues)) <= 0.27 * full  # shards differ by one


def test_fape_by_chain_holds_no_array_of_all_pairs() -> None:
    """Catches a mask, or a count, that has an entry for each pair of residues."""
    leaves, batch = leaves_of(1, 64), batch_of(1, 64, chains=True)
    output, weights = output_of(leaves, LocalExchange()), dict.fromkeys(TERMS, 0.0) | {"interface_fape": 1.0}
    output.structure.backbone.translation.requires_grad_()
    few = mock.patch.object(structure, "CPU_PAIRS", 1)
    with few, Largest([*leaves.values(), *batch.values()]) as seen:
        total_loss(output, batch, LossConfig(**weights), HEADS)[0].backward()
    assert seen.elements < 64**2 + 64 * 7 * 3 * ITERATIONS


def clashes_of(exchange: Exchange) -> Tensor:
    batch, atom14 = batch_of(2), leaves_of(2)["atom14"]
    mask, index, aatype = (batch[name][:, -1] for name in ("atom14_atom_exists", "residue_index", "aatype"))
    return find_violations(atom14, mask, index, aatype, exchange).clash_atom_loss


def clashes_on_rank(group: Group) -> Tensor:
    return clashes_of(ShardedExchange(Group(group)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_clashes_of_each_atom(pool: RankPool, ranks: int) -> None:
    """Catches a clash between two shards that is counted twice or not at all."""
    serial = clashes_of(LocalExchange())
    assert (serial > 0).sum() > 20
    torch.testing.assert_close(torch.stack(pool.run(ranks, clashes_on_rank)).mean(0), serial, rtol=0, atol=TOLERANCE)


def readings(exchange: Exchange) -> tuple[Tensor, Tensor]:
    """The predicted aligned error and the predicted TM-score."""
    logits, mask = (
        shards(leaves_of(2), exchange)["predicted_aligned_error_logits"].detach(),
        batch_of(2)["seq_mask"][:, -1],
    )
    return compute_pae(3 * logits), compute_ptm(3 * logits, mask, exchange=exchange)


def readings_on_rank(group: Group) -> tuple[Tensor, Tensor]:
    return readings(ShardedExchange(Group(group)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pae_and_ptm_of_rows(pool: RankPool, ranks: int) -> None:
    """Catches a best frame chosen on one rank, a chain length counted from a rank's rows, and a mask sharded wrongly."""
    pae, ptm = readings(LocalExchange())
    parts = pool.run(ranks, readings_on_rank)
    torch.testing.assert_close(torch.cat([part[0] for part in parts], 1), pae, rtol=0, atol=0)
    for _, found in parts:
        torch.testing.assert_close(found, ptm, rtol=0, atol=TOLERANCE)


def fape_on_rank(group: Group) -> Tensor:
    exchange = ShardedExchange(Group(group))
    leaves, frames = leaves_of(1), torch.zeros(1, RESIDUES, 8, dtype=torch.float64)
    frames[0, 4, 0] = 1
    predicted = Rigid(leaves["frame_rotation"], leaves["frame_translation"])
    truth, atoms = Rigid.identity(predicted.shape, leaves["atom14"]), torch.ones_like(leaves["atom14"][..., 0])
    origin, listed = torch.zeros_like(leaves["atom14"]), torch.tensor([[4 * 8]])
    return sidechain_fape(predicted, truth, frames, leaves["atom14"], origin, atoms, exchange, observed_frames=listed)


def test_a_rank_without_frames_counts_nothing(pool: RankPool) -> None:
    """Catches 0 / 0 and errors on empty tensors, where a rank has no frame."""
    (serial,), parts = pool.run(1, fape_on_rank), pool.run(3, fape_on_rank)
    torch.testing.assert_close(torch.stack(parts).mean(0), serial, rtol=0, atol=TOLERANCE)
    assert [bool(part > 0) for part in parts] == [True, False, False]


def test_lddt_of_some_residues_is_a_part_of_all() -> None:
    """Catches neighbours sought among the given rows only, and a residue counted as its own neighbour in later rows."""
    source = Source(0)
    predicted, true = (source.normal(2, RESIDUES, 3, scale=4) for _ in range(2))
    mask = source.mask(2, RESIDUES)
    full = lddt_ca(predicted, true, mask, per_residue=True)
    parts = [lddt_ca(predicted, true, mask, per_residue=True, rows=slice(a, b)) for a, b in ((0, 2), (2, 3), (3, 7))]
    torch.testing.assert_close(torch.cat(parts, -1), full, rtol=0, atol=0)


@pytest.mark.parametrize(("chains", "weights"), [(False, WEIGHTS), (True, CHAIN_WEIGHTS)])
def test_no_term_waits_forward_or_backward(chains: bool, weights: LossConfig) -> None:
    """Catches a search for pairs or entries on the device (`nonzero`, a mask as index, a count that is read), and constants
    that are copied to it in each step."""
    exchange = LocalExchange()
    leaves = {name: leaf.to("meta").requires_grad_() for name, leaf in leaves_of(2).items()}
    batch = {name: value.to("meta") for name, value in batch_of(2, chains=chains).items()}
    total_loss(output_of(leaves, exchange), batch, weights, HEADS)  # constants are copied once
    with HostWaits() as seen:
        loss, _ = total_loss(output_of(leaves, exchange), batch, weights, HEADS)
        loss.backward()
    assert seen.waits == []


@pytest.mark.parametrize(("chains", "weights"), [(False, WEIGHTS), (True, CHAIN_WEIGHTS)])
def test_a_recorded_loss_is_the_loss(chains: bool, weights: LossConfig) -> None:
    """Catches labels or lists of an earlier step in a replay, a term whose inputs the recording lacks, and a recording
    of its own for each number of recycling iterations, or for what exists in a sample."""
    graphs, recorded = Graphs(Rerun()), RecordedLoss(weights, HEADS)
    use_graphs(recorded, graphs)
    for step in range(4):
        batch = batch_of(2, chains=chains)
        iterations = {name: x for name, x in batch.items() if x.ndim > 1 and x.shape[1] == 2 and not x[:, 0].any()}
        batch |= {name: torch.cat([x[:, :1].expand(-1, step, *x.shape[2:]), x], 1) for name, x in iterations.items()}
        batch["rigidgroups_gt_exists"][0, :step] = 0
        batch |= existing_entries(batch)
        given = [{name: (1 + step) * x for name, x in leaves_of(2).items()} for _ in range(2)]
        if chains:
            for leaves in given:
                leaves["masked_msa_logits"] = leaves["masked_msa_logits"][..., :LETTERS_WITH_GAP]
        first, second = ({name: x.detach().requires_grad_() for name, x in leaves.items()} for leaves in given)
        usual, terms = total_loss(output_of(first, LocalExchange()), batch, weights, HEADS)
        found, parts = recorded(output_of(second, LocalExchange()), batch)
        for loss in (usual, found):
            (2 * loss).backward()
        assert torch.equal(usual, found)
        assert {name: x.item() for name, x in terms.items()} == {name: x.item() for name, x in parts.items()}
        for name, leaf in first.items():
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (leaf, second[name])]
            assert torch.equal(*gradients), name
    assert (graphs.replays, len(graphs)) == (3, 1)
