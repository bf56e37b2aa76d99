"""The comparators of the pair stack compute what one device computes, and what they move is what their formulas say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.dropout import DropoutKeys
from evodsp.parallel.collectives import DIMENSION
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, Ledger
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from scripts.benchmarks import memory, pair_volume
from scripts.benchmarks.pair_stacks import DSP, FASTFOLD, FOLD_CP, FOLD_CP_PROJECTIONS, Method
from scripts.benchmarks.ring import ring
from tests.builders.comparison import close
from tests.ranks import RankPool

RESIDUES, CHANNELS, BATCH, BLOCKS = 12, 10, 2, 2
CONFIG = EvoformerConfig(
    blocks=BLOCKS, pair_heads=3, pair_head_width=5, triangle_channels=7, transition_factor=2, checkpoint=True
)


def gradients_of(method: Method, exchange: Exchange, residues: int = RESIDUES) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's shard of the output of two recomputed pair stacks, and gradients of the input and of the parameters."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    stacks = method.stack(BLOCKS, CHANNELS, CONFIG, exchange)
    dense(stacks)
    z = random(BATCH, residues, residues, CHANNELS).requires_grad_()
    weight, mask = random(*z.shape), (random(BATCH, residues, residues) > -1).double()
    keys = DropoutKeys.of(stacks.dropout_streams([Draws.root(3).at("sample", sample) for sample in range(BATCH)]))
    output = stacks(exchange.shard(z, method.axis), mask, keys)
    (exchange.ranks * exchange.shard(weight, method.axis) * output).sum().backward()
    return output.detach(), {name: x.grad for name, x in [("z", z), *stacks.named_parameters()]}


def on_rank(handle: Any, method: Method, residues: int = RESIDUES) -> tuple[Tensor, dict[str, Tensor], Ledger]:
    """The same on one rank of a group, gradients averaged over ranks; and the ledger."""
    ledger = Ledger()
    output, gradients = gradients_of(method, ShardedExchange(Group(handle, ledger)), residues)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=handle)
        gradient /= dist.get_world_size(handle)
    return output, gradients, ledger


@pytest.mark.parametrize(
    ("method", "ranks"),
    [(DSP, 2), (FASTFOLD, 2), *((method, ranks) for method in (FOLD_CP, FOLD_CP_PROJECTIONS) for ranks in (2, 3, 4))],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_way_of_communicating_computes_what_one_device_computes(
    pool: RankPool, method: Method, ranks: int
) -> None:
    """Catches a comparator that is cheaper because it computes something else, or loses gradients of other ranks' uses."""
    output, gradients = gradients_of(DSP, LocalExchange())
    found = pool.run(ranks, on_rank, method)
    close(torch.cat([rank[0] for rank in found], DIMENSION[method.axis]), output, "output")
    for _, rank_gradients, _ in found:
        for name, gradient in gradients.items():
            close(rank_gradients[name], gradient, f"gradient of {name}")


@pytest.mark.parametrize("ranks", [4, pytest.param(64, marks=pytest.mark.verify)])
@pytest.mark.parametrize("method", pair_volume.METHODS, ids=lambda method: method.name)
def test_what_a_pair_stack_moves_is_what_its_formula_says(method: Method, ranks: int) -> None:
    """Catches a collective or a ring that is counted in the wrong phase, twice, or not at all."""
    residues = pair_volume.RESIDUES[0]
    assert pair_volume.differences(method, ranks, residues, pair_volume.measure(method, ranks, residues)) == []


@pytest.mark.parametrize("method", [FOLD_CP, FOLD_CP_PROJECTIONS], ids=lambda method: method.name)
def test_fake_ranks_count_what_real_ranks_send(pool: RankPool, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a count on tensors without memory that differs from the program's on real ones."""
    sizes = dataclasses.replace(ModelConfig().channels, pair=CHANNELS)
    small = dataclasses.replace(ModelConfig(), evoformer=CONFIG, channels=sizes)
    monkeypatch.setattr(pair_volume, "ModelConfig", lambda: small)
    counted = pair_volume.counted(pair_volume.measure(method, 4, RESIDUES))
    for _, _, ledger in pool.run(4, on_rank, method):
        for key, count in pair_volume.counted(ledger).items():
            assert count.calls == BLOCKS * counted[key].calls, key
            assert count.elements == BATCH * BLOCKS * counted[key].elements, key


def test_a_wrong_count_of_a_pair_stack_is_reported() -> None:
    """Catches a check that accepts any count."""
    ledger = pair_volume.measure(FOLD_CP, 2, 8)
    del ledger.entries[0]  # the first ring
    found = pair_volume.differences(FOLD_CP, 2, 8, ledger)
    assert found == [
        "pair stack, R=8, 2 ranks, Fold-CP 1d: forward send-receive: None in the ledger, "
        "Count(calls=1, elements=8192) by the formula"
    ]


def test_shards_that_fold_cp_cannot_have_equal_are_refused() -> None:
    """Catches a program that hangs or fails in a receive, where one line can say what is wrong."""
    with pytest.raises(UserError, match=r"3 ranks do not divide 256 residues; crop or pad .* e\.g\. 258"):
        pair_volume.measure(FOLD_CP, 3, 256)


def rounds(handle: Any) -> tuple[list[tuple[int, float, float]], list[tuple[str, int]]]:
    """What comes past this rank in a ring of two tensors, and the ledger's entries."""
    ledger, rank = Ledger(), dist.get_rank(handle)
    one, two = torch.full((2, 3), float(rank)), torch.full((5,), 10.0 * rank)
    seen = [(owner, a.mean().item(), b.mean().item()) for owner, (a, b) in ring(Group(handle, ledger), one, two)]
    return seen, [(entry.kind, entry.elements) for entry in ledger.entries]


def test_a_ring_shows_every_ranks_tensors_to_every_rank(pool: RankPool) -> None:
    """Catches tensors under the wrong rank's number, and a ring that does not count what an all-gather counts."""
    for rank, (seen, entries) in enumerate(pool.run(3, rounds)):
        assert seen == [(owner % 3, owner % 3, 10 * (owner % 3)) for owner in range(rank, rank + 3)]
        assert entries == [("send-receive", 18), ("send-receive", 15)]


def test_a_rank_of_fold_cp_holds_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a comparator that keeps whole operands or biases, which Fold-CP does not, or memory that is never freed."""
    monkeypatch.setattr(memory, "PAIR_RESIDUES", 256)
    # Not from one rank: that forms operands of triangle multiplication again, which ranks keep.
    two, four = (memory.measure(memory.pair_stacks(FOLD_CP, 2, False), ranks) for ranks in (2, 4))
    assert four.peak < 0.54 * two.peak
    assert four.current == 0
