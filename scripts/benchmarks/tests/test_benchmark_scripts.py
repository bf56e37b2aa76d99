"""The benchmarks under `scripts/benchmarks` measure what they claim: tests of the parts that decide their numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.testing import dense
from scripts.benchmarks import communication, memory
from scripts.benchmarks.peak_memory import PeakMemory
from tests.builders.comparison import close
from tests.ranks import RankPool

SEQUENCES, RESIDUES = 6, 7


def extra_msa(exchange: Exchange, dap: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs of an extra-MSA stack, and gradients of inputs and parameters."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    config, s, r = ModelConfig.preset("test"), SEQUENCES, RESIDUES
    sizes = dataclasses.replace(config.extra_msa, blocks=3, checkpoint=False)
    stack = EvoformerStack(config.channels.extra_msa, config.channels.pair, sizes, extra=True)
    dense(stack)
    use_exchange(stack, exchange, DAP if dap else None)
    inputs = {"m": random(1, s, r, config.channels.extra_msa), "z": random(1, r, r, config.channels.pair)}
    for x in inputs.values():
        x.requires_grad_()
    m, z = inputs["m"], inputs["z"]
    msa_mask, pair_mask = (random(1, s, r) > -1).double(), (random(1, r, r) > -1).double()
    outputs = dict(zip("mz", stack(exchange.shard(m, "seq"), exchange.shard(z, "j"), msa_mask, pair_mask), strict=True))
    weights = {"m": random(*m.shape), "z": random(*z.shape)}
    axes = {"m": "res" if dap else "seq", "z": "j"}
    loss = sum((exchange.shard(weights[name], axes[name]) * x).sum() for name, x in outputs.items())  # type: ignore[arg-type]
    (exchange.ranks * loss).backward()
    gradients = {name: x.grad for name, x in [*inputs.items(), *stack.named_parameters()]}
    return {name: x.detach() for name, x in outputs.items()}, gradients


def dap_on_rank(handle: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stack under DAP on one rank: its shards of the outputs, and gradients averaged over ranks."""
    torch.set_default_dtype(torch.float64)
    try:
        outputs, gradients = extra_msa(ShardedExchange(Group(handle)), dap=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=handle)
        gradient /= dist.get_world_size(handle)
    return outputs, gradients


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_comparator_of_the_extra_msa_stack_equals_one_device(pool: RankPool, ranks: int) -> None:
    """Catches a DAP schedule that computes something else or loses gradients: a comparison with it would mean nothing."""
    torch.set_default_dtype(torch.float64)
    try:
        outputs, gradients = extra_msa(LocalExchange(), dap=False)
    finally:
        torch.set_default_dtype(torch.float32)
    found = pool.run(ranks, dap_on_rank)
    for name, output in outputs.items():
        close(torch.cat([rank[0][name] for rank in found], 2), output, name)  # both outputs are sharded along axis 2
    for _, rank_gradients in found:
        for name, gradient in gradients.items():
            close(rank_gradients[name], gradient, f"gradient of {name}")


@pytest.mark.parametrize("case", communication.CASES, ids=str)
@pytest.mark.parametrize("ranks", [4, pytest.param(16, marks=pytest.mark.verify)])
def test_the_ledger_of_fake_ranks_equals_formula_and_schedule(case: communication.Case, ranks: int) -> None:
    """Catches, at full size, a call missing in the schedule, and a backward pass that moves more than the forward pass."""
    for plan in (communication.DSP, DAP):
        moved = communication.measure(case, ranks, plan)
        assert communication.differences(case, ranks, plan, moved) == []
        assert moved.bytes("backward") == moved.bytes("forward")


def test_training_with_default_settings_moves_1_4_times_what_the_passes_need() -> None:
    """Catches a table that leaves out recomputation, which moves 36 MiB again, of 44 MiB."""
    moved = communication.measure(communication.CASES[0], 4, communication.DSP, torch.bfloat16)
    assert [moved.bytes(phase) / 2**20 for phase in communication.PHASES] == [44, 36, 44]
    regathering = communication.measure(communication.CASES[0], 4, communication.DAP_REGATHERING)
    assert (
        regathering.bytes("recompute") == regathering.bytes("forward") - 4 * 128 * 256 * 256 // 4
    )  # everything but the switch back to S


def test_numbers_that_travel_in_bf16_are_half_the_bytes() -> None:
    """Catches a collective that ignores the precision of messages."""
    case, plan = communication.CASES[0], communication.DSP
    narrow, wide = (communication.measure(case, 4, plan, dtype).total for dtype in (torch.bfloat16, torch.float32))
    assert 2 * narrow == wide


def test_a_wrong_count_is_reported() -> None:
    """Catches a check that accepts any count."""
    case, plan = communication.CASES[0], communication.DSP
    moved = communication.measure(case, 4, plan)
    short = dataclasses.replace(moved, forward=moved.forward[:-1], recompute=Counter(moved.forward))
    found = [line.partition(": ") for line in communication.differences(case, 4, plan, short)]
    assert {name for name, _, _ in found} == {"Evoformer block, S=128 R=256, 4 ranks, DSP"}
    assert [what.split(" differs")[0] for _, _, what in found[1:]] == [
        "the forward pass in the ledger",
        "the recomputation in the ledger",
    ]


def test_four_ranks_hold_less_than_a_third_of_what_one_holds() -> None:
    """Catches an activation that every rank holds in full, or that is kept twice where ranks communicate."""
    one, four = (memory.measure(memory.stacks, ranks) for ranks in (1, 4))
    assert four.peak <= memory.LIMIT_AT_4 * one.peak
    assert one.current == four.current == 0  # all that was counted as allocated is counted as freed


def test_what_is_counted_as_held_is_what_pytorch_allocates() -> None:
    """Catches memory that is missed, counted twice (views), or not subtracted when it is freed."""

    def program() -> None:
        x = torch.ones(300, 400, requires_grad=True)
        y = (x @ weight).relu()
        y = torch.cat([y[:, :50], y.exp()[:, 50:]], 1).view(-1)
        (y.sum() + x.sum()).backward()

    weight = torch.ones(400, 400)
    with PeakMemory() as memory_of_program:
        program()
    with torch.profiler.profile(profile_memory=True) as profiler:
        program()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert memory_of_program.peak == pytest.approx(max(itertools.accumulate(sizes)), rel=1e-3)
    assert memory_of_program.peak > 4 * 4 * 300 * 400
