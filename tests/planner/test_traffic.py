"""The communication that the schedule predicts for a stack equals the ledger of a run, call by call."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from evodsp.config import ALPHAFOLD2, MULTIMER, EvoformerConfig, ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group, Ledger
from scripts.benchmarks.traffic import (
    CollectiveCall,
    StackSizes,
    evoformer_calls,
    extra_msa_calls,
    inner_block,
    recomputed,
)
from tests.ranks import RankPool

RESIDUES = 7


def sizes(
    extra: bool,
    sequences: int,
    ranks: int,
    rank: int,
    batch: int,
    plan: CommunicationPlan,
    recompute: bool = False,
    order: tuple[str, ...] = ALPHAFOLD2,
) -> StackSizes:
    """The sizes from which the schedule predicts the stack's communication."""
    config = ModelConfig.preset("test")
    stack = dataclasses.replace(
        config.extra_msa if extra else config.evoformer, blocks=2, checkpoint=recompute, layers=order
    )
    c_m = config.channels.extra_msa if extra else config.channels.msa
    return StackSizes(ranks, rank, batch, sequences, RESIDUES, c_m, config.channels.pair, stack, plan)


def traffic(
    handle: Any,
    extra: bool,
    sequences: int,
    batch: int,
    plan: CommunicationPlan,
    recompute: bool = False,
    order: tuple[str, ...] = ALPHAFOLD2,
) -> Ledger:
    """The ledger of a stack's forward and backward pass on one rank."""
    ledger = Ledger()
    exchange = ShardedExchange(Group(handle, ledger))
    n = sizes(extra, sequences, exchange.group.size, exchange.group.rank, batch, plan, recompute, order)
    stack = EvoformerStack(n.c_m, n.c_z, n.config, extra)
    use_exchange(stack, exchange, plan)
    m = exchange.shard(torch.randn(batch, sequences, RESIDUES, n.c_m), "seq").requires_grad_()
    z = exchange.shard(torch.randn(batch, RESIDUES, RESIDUES, n.c_z), "j").requires_grad_()
    m, z = stack(m, z, torch.ones(batch, sequences, RESIDUES), torch.ones(batch, RESIDUES, RESIDUES))
    (m.sum() + z.sum()).backward()
    return ledger


@pytest.mark.verify_but("True-6-*")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("extra", "sequences", "plan"),
    [
        (False, 5, CommunicationPlan()),
        (True, 6, CommunicationPlan()),
        (True, 40, CommunicationPlan()),
        (False, 5, DAP),
        (True, 40, DAP),
        (True, 6, CommunicationPlan(outer_product_mean="sum", stream_bias=True, triangle_incoming="gather")),
    ],
    ids=str,
)
def test_ledger_is_what_the_schedule_predicts(
    pool: RankPool, extra: bool, sequences: int, plan: CommunicationPlan, ranks: int
) -> None:
    """Catches a collective that the schedule does not list, and one that moves more than predicted."""
    for rank, ledger in enumerate(pool.run(ranks, traffic, extra, sequences, 2, plan)):
        n = sizes(extra, sequences, ranks, rank, 2, plan)
        calls = extra_msa_calls(n) if extra else evoformer_calls(n)
        forward = [(entry.kind, entry.elements) for entry in ledger.of("forward")]
        assert forward == [(call.kind, call.elements) for call in calls]
        transposed = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather", "broadcast": "reduce"}
        backward = Counter((entry.kind, entry.elements) for entry in ledger.of("backward"))
        assert backward == Counter((transposed.get(c.kind, c.kind), c.backward) for c in calls if c.backward)
        streamed = sum(call.kind == "broadcast" for call in calls)  # shards of a bias are broadcast again
        assert [entry.kind for entry in ledger.of("recompute")] == streamed * ["broadcast"]


@pytest.mark.verify_but("False-False-5-plan0")
@pytest.mark.parametrize(
    ("extra", "sequences", "plan"), [(False, 5, CommunicationPlan()), (True, 40, CommunicationPlan()), (True, 6, DAP)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_ledger_of_blocks_that_begin_with_the_outer_product_is_what_the_schedule_predicts(
    pool: RankPool, extra: bool, sequences: int, plan: CommunicationPlan, recompute: bool
) -> None:
    """Catches a collective of AlphaFold-Multimer's blocks that the schedule does not list, in any pass."""
    order = MULTIMER
    for rank, ledger in enumerate(pool.run(3, traffic, extra, sequences, 2, plan, recompute, order)):
        n = sizes(extra, sequences, 3, rank, 2, plan, recompute, order)
        calls = extra_msa_calls(n) if extra else evoformer_calls(n)
        assert [(entry.kind, entry.elements) for entry in ledger.of("forward")] == [(c.kind, c.elements) for c in calls]
        assert len(ledger.of("backward")) == sum(call.backward > 0 for call in calls)
        found = Counter((entry.kind, entry.elements) for entry in ledger.of("recompute"))
        again = recomputed(calls, plan) if recompute else []
        assert found == Counter((call.kind, call.elements) for call in again)


def test_a_block_that_begins_with_the_outer_product_moves_as_much_in_an_order_that_hides_it() -> None:
    """Catches a switch of the MSA that is launched where nothing is left to compute before its result is read."""
    n = StackSizes(8, 0, 1, 128, 256, 256, 128, EvoformerConfig())
    first = inner_block(dataclasses.replace(n, config=EvoformerConfig(layers=MULTIMER)))
    assert Counter(first) == Counter(
        dataclasses.replace(call, layer="switch m") if call.layer == "switch m outside" else call
        for call in inner_block(n)
    )
    assert [call.layer for call in first] == [
        "outer_product_mean", "switch m", "row_attention",
        *("triangle_outgoing",) * 2, "switch z", *("triangle_incoming",) * 2, "switch m",
        "attention_starting", "switch z", "attention_ending",
    ]  # fmt: skip


def volume(calls: list[CollectiveCall]) -> int:
    return sum(call.elements for call in calls)


SIZES = [(128, 256), pytest.param(512, 384, marks=pytest.mark.verify)]


@pytest.mark.verify_but("64-128-256")
@pytest.mark.parametrize(("sequences", "residues"), SIZES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64], ids=str)
def test_a_block_moves_what_the_design_says(sequences: int, residues: int, ranks: int) -> None:
    """Catches a volume other than the design's 2 Mm/N + Mm/8 + Mz (1/8 + 8/N) numbers, in twelve collectives.

    Where sizes divide, all ranks move the same.
    """
    for rank in (0, ranks - 1):
        n = StackSizes(ranks, rank, 1, sequences, residues, 256, 128, EvoformerConfig())
        msa, pair = sequences * residues * 256, residues**2 * 128
        calls = inner_block(n)
        assert len(calls) == 12
        assert volume(calls) == 2 * msa // ranks + msa // 8 + pair // 8 + 8 * pair // ranks


@pytest.mark.parametrize(("sequences", "residues"), SIZES)
@pytest.mark.parametrize(
    ("ranks", "most"),
    [(4, 0.80), *(pytest.param(*limit, marks=pytest.mark.verify) for limit in ((8, 0.60), (16, 0.45), (64, 0.27)))],
)
def test_a_block_moves_less_than_under_dap(sequences: int, residues: int, ranks: int, most: float) -> None:
    """Catches a plan that saves less than the design promises over DAP, which moves 2 Mm/N + Mm/8 + Mz (2 + 1/8 + 4/N)."""
    n = StackSizes(ranks, 0, 1, sequences, residues, 256, 128, EvoformerConfig())
    msa, pair = sequences * residues * 256, residues**2 * 128
    dap = volume(inner_block(dataclasses.replace(n, plan=DAP)))
    assert dap == 2 * msa // ranks + msa // 8 + 2 * pair + pair // 8 + 4 * pair // ranks
    assert volume(inner_block(n)) / dap <= most


@pytest.mark.parametrize(
    ("sequences", "residues", "most"), [(1024, 256, 0.65), pytest.param(5120, 384, 0.35, marks=pytest.mark.verify)]
)
def test_an_extra_msa_block_moves_less_than_under_dap(sequences: int, residues: int, most: float) -> None:
    """Catches switches of the extra MSA: DAP switches it to R and back in every block; here it stays sharded along S."""
    config = ModelConfig().extra_msa
    n = StackSizes(4, 0, 1, sequences, residues, 64, 128, dataclasses.replace(config, blocks=1))
    assert volume(extra_msa_calls(n)) / volume(inner_block(dataclasses.replace(n, plan=DAP))) <= most


@pytest.mark.parametrize(
    ("sequences", "residues", "ranks", "collectives"),
    [
        *(pytest.param(5120, 384, *rest, marks=pytest.mark.verify) for rest in ((2, 2), (8, 2), (64, 10))),
        (1024, 256, 8, 4),
    ],
)
def test_partial_outer_products_are_few_collectives_of_bounded_size(
    sequences: int, residues: int, ranks: int, collectives: int
) -> None:
    """Catches a collective for each shard, a partial sum that is larger than the operands, and one that is whole."""
    config = dataclasses.replace(ModelConfig().extra_msa, blocks=1)
    n = StackSizes(ranks, ranks - 1, 1, sequences, residues, 64, 128, config)
    sums = [call.elements for call in inner_block(n, extra=True) if call.kind == "reduce-scatter"]
    assert len(sums) == collectives
    assert sum(sums) == residues**2 * 128
    assert max(sums) <= 1.1 * 2 * 32 * sequences * residues / ranks  # pieces are of whole rows
    assert max(sums) < residues**2 * 128


@pytest.mark.verify_but("True-6-*")
@pytest.mark.parametrize(
    ("extra", "sequences", "plan"),
    [
        (False, 5, CommunicationPlan()),
        (False, 5, CommunicationPlan(keep_gathered=False)),
        (True, 6, CommunicationPlan()),
        (True, 6, CommunicationPlan(keep_gathered=False)),
        (True, 40, CommunicationPlan()),  # its outer product mean sums over ranks
    ],
    ids=str,
)
def test_recomputation_communicates_what_the_schedule_says(
    pool: RankPool, extra: bool, sequences: int, plan: CommunicationPlan
) -> None:
    """Catches repeated gathers of results that are kept, repeated switches between blocks, and entries in the wrong phase."""
    for rank, ledger in enumerate(pool.run(2, traffic, extra, sequences, 2, plan, True)):
        n = sizes(extra, sequences, 2, rank, 2, plan)
        calls = extra_msa_calls(n) if extra else evoformer_calls(n)
        found = Counter((entry.kind, entry.elements) for entry in ledger.of("recompute"))
        assert found == Counter((call.kind, call.elements) for call in recomputed(calls, plan))
        assert [(entry.kind, entry.elements) for entry in ledger.of("forward")] == [(c.kind, c.elements) for c in calls]
        assert len(ledger.of("backward")) == sum(call.backward > 0 for call in calls)


def test_two_evoformer_blocks_launch_seven_switches_each_again(pool: RankPool) -> None:
    """Catches repeated gathers, or a repeated switch between blocks.

    Recomputation repeats 14 of 23 collectives: all but four gathers per block and the switch between the blocks.
    """
    for ledger in pool.run(2, traffic, False, 5, 2, CommunicationPlan(), True):
        assert (len(ledger.of("forward")), len(ledger.of("backward"))) == (23, 23)
        assert [entry.kind for entry in ledger.of("recompute")] == 14 * ["all-to-all"]
        assert ledger.bytes() == sum(ledger.bytes(phase) for phase in ("forward", "recompute", "backward"))


PAIR_CALLS = [
    *(("triangle_outgoing", "all-to-all"),) * 2,
    ("switch z", "all-to-all"),
    *(("triangle_incoming", "all-to-all"),) * 2,
    ("attention_starting", "all-gather"),
    ("switch z", "all-to-all"),
    ("attention_ending", "all-gather"),
]


@pytest.mark.parametrize(
    ("extra", "msa_calls"),
    [
        (False, [("row_attention", "all-gather"), ("switch m", "all-to-all"), ("outer_product_mean", "all-gather"),
                 ("switch m outside", "all-to-all")]),
        (True, [("row_attention", "all-gather"), ("column_attention", "all-reduce"),
                ("column_attention", "all-gather"), ("outer_product_mean", "all-gather"),
                ("outer_product_mean", "all-to-all")]),
    ],
)  # fmt: skip
def test_the_schedule_is_the_documented_one(extra: bool, msa_calls: list[tuple[str, str]]) -> None:
    """Catches an added, missing or moved collective.

    The schedule is traced from the model's code, so only this list says what it should be.
    """
    n = StackSizes(2, 0, 1, 6, RESIDUES, 12, 10, ModelConfig.preset("test").evoformer)
    assert [(call.layer, call.kind) for call in inner_block(n, extra)] == [*msa_calls, *PAIR_CALLS]
