"""What the schedule says a stack communicates is what the ledger of a run holds, call by call."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.traffic import Call, Sizes, evoformer_calls, extra_msa_calls, inner_block
from evodsp.parallel.collectives import Group
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.ledger import Entry, Ledger
from tests.ranks import RankPool

RESIDUES = 7


def sizes(extra: bool, sequences: int, ranks: int, rank: int, batch: int) -> Sizes:
    config = ModelConfig.preset("test")
    stack = dataclasses.replace(config.extra_msa if extra else config.evoformer, blocks=2)
    c_m = config.channels.extra_msa if extra else config.channels.msa
    return Sizes(ranks, rank, batch, sequences, RESIDUES, c_m, config.channels.pair, stack)


def entries(handle: Any, extra: bool, sequences: int, batch: int) -> list[Entry]:
    ledger = Ledger()
    exchange = ShardedExchange(Group(handle, ledger))
    n = sizes(extra, sequences, exchange.group.size, exchange.group.rank, batch)
    stack = EvoformerStack(n.c_m, n.c_z, n.config, extra)
    use_exchange(stack, exchange)
    m = exchange.shard(torch.randn(batch, sequences, RESIDUES, n.c_m), "seq").requires_grad_()
    z = exchange.shard(torch.randn(batch, RESIDUES, RESIDUES, n.c_z), "j").requires_grad_()
    m, z = stack(m, z, torch.ones(batch, sequences, RESIDUES), torch.ones(batch, RESIDUES, RESIDUES))
    (m.sum() + z.sum()).backward()
    return ledger.entries


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("extra", "sequences"), [(False, 5), (True, 6), (True, 40)])
def test_ledger_is_what_the_schedule_predicts(pool: RankPool, extra: bool, sequences: int, ranks: int) -> None:
    """A collective that nobody planned, or one that moves more than it should."""
    for rank, ledger in enumerate(pool.run(ranks, entries, extra, sequences, 2)):
        n = sizes(extra, sequences, ranks, rank, 2)
        calls = extra_msa_calls(n) if extra else evoformer_calls(n)
        forward = [(entry.kind, entry.elements) for entry in ledger if not entry.backward]
        assert forward == [(call.kind, call.elements) for call in calls]
        transposed = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
        backward = Counter((entry.kind, entry.elements) for entry in ledger if entry.backward)
        assert backward == Counter((transposed.get(c.kind, c.kind), c.backward) for c in calls if c.backward)


def volume(calls: list[Call]) -> int:
    return sum(call.elements for call in calls)


@pytest.mark.parametrize(("sequences", "residues"), [(128, 256), (512, 384)])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_a_block_moves_what_the_design_says(sequences: int, residues: int, ranks: int) -> None:
    """2 Mm/N + Mm/8 + Mz (1/8 + 8/N) numbers in twelve collectives, the same on every rank where sizes divide."""
    for rank in (0, ranks - 1):
        n = Sizes(ranks, rank, 1, sequences, residues, 256, 128, EvoformerConfig())
        msa, pair = sequences * residues * 256, residues**2 * 128
        calls = inner_block(n)
        assert len(calls) == 12
        assert volume(calls) == 2 * msa // ranks + msa // 8 + pair // 8 + 8 * pair // ranks
