"""What the benchmarks under `scripts/benchmarks` measure is what they say: the parts that decide their numbers."""

from __future__ import annotations

import dataclasses
import itertools
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
from scripts.benchmarks import communication, long_protein, memory, trace
from scripts.benchmarks.dap import switch_in_every_block
from scripts.benchmarks.held import Activations
from tests.builders.comparison import close
from tests.builders.parameters import dense
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
    dense(switch_in_every_block(stack) if dap else stack)
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
    """A comparison with a schedule that computes something else, or has FastFold's lost gradients, says nothing."""
    torch.set_default_dtype(torch.float64)
    try:
        outputs, gradients = extra_msa(LocalExchange(), dap=False)
    finally:
        torch.set_default_dtype(torch.float32)
    found = pool.run(ranks, dap_on_rank)
    for name, output in outputs.items():
        close(torch.cat([rank[0][name] for rank in found], 2), output, name)  # both come out cut along axis 2
    for _, of_rank in found:
        for name, gradient in gradients.items():
            close(of_rank[name], gradient, f"gradient of {name}")


@pytest.mark.parametrize("case", communication.CASES, ids=str)
@pytest.mark.parametrize("ranks", [4, 16])
def test_the_ledger_of_fake_ranks_is_formula_and_schedule(case: communication.Case, ranks: int) -> None:
    """A call that the schedule does not know, at full size; a backward pass that moves more than the forward one."""
    for dap in (False, True):
        moved = communication.measure(case, ranks, dap)
        assert communication.differences(case, ranks, dap, moved) == []
        forward = moved.bytes - moved.backward_bytes
        maximum = 2 * 4 * case.residues * case.config.msa_heads if case.extra and not dap else 0
        assert moved.backward_bytes == forward - maximum  # the softmax's maximum is outside of the graph


def test_numbers_that_travel_in_bf16_are_half_the_bytes() -> None:
    """A collective that forgets in which precision numbers are to travel."""
    case = communication.CASES[0]
    narrow, wide = (communication.measure(case, 4, False, dtype).bytes for dtype in (torch.bfloat16, torch.float32))
    assert 2 * narrow == wide


def test_a_count_that_is_off_is_told() -> None:
    """A check that passes whatever is counted."""
    case = communication.CASES[0]
    moved = communication.measure(case, 4, dap=False)
    short = dataclasses.replace(moved, forward=moved.forward[:-1])
    assert [line.split(": ")[0] for line in communication.differences(case, 4, False, short)] == [
        "Evoformer block, S=128 R=256, 4 ranks, DSP"
    ] * 2


def test_four_ranks_hold_less_than_a_third_of_what_one_holds() -> None:
    """An activation of a stack that is whole on every rank, or kept twice where ranks communicate."""
    one, four = (memory.measure(memory.stacks, ranks) for ranks in (1, 4))
    assert four.peak <= memory.ASKED_OF_4 * one.peak
    assert one.now == four.now == 0  # what is counted as come is counted as gone


def test_what_is_counted_as_held_is_what_pytorch_allocates() -> None:
    """Memory that is missed, counted twice (views) or not counted off."""

    def program() -> None:
        x = torch.ones(300, 400, requires_grad=True)
        y = (x @ weight).relu()
        y = torch.cat([y[:, :50], y.exp()[:, 50:]], 1).view(-1)
        (y.sum() + x.sum()).backward()

    weight = torch.ones(400, 400)
    with Activations() as held:
        program()
    with torch.profiler.profile(profile_memory=True) as profiler:
        program()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert held.peak == pytest.approx(max(itertools.accumulate(sizes)), rel=1e-3)
    assert held.peak > 4 * 4 * 300 * 400


def traced(handle: Any) -> list[trace.Interval]:
    return trace.intervals(trace.run(Group(handle), sequences=8, residues=8, blocks=2))


def test_collectives_launched_early_lie_over_compute_in_both_passes(pool: RankPool) -> None:
    """A switch awaited where it is launched; in the backward pass, a transpose launched only where it is needed."""
    for found in pool.run(2, traced):
        for direction in ("forward", "backward"):
            collectives = {x.name: x for x in found if (x.what, x.direction) == ("collective", direction)}
            assert len(collectives) == 12 + 11
            layers = {
                name: {
                    layer.name
                    for layer in found
                    if (layer.what, layer.direction) == ("compute", direction)
                    and x.start < layer.start < layer.end < x.awaited
                }
                for name, x in collectives.items()
            }
            pair_half = {f"{name} 0" for name in ("triangle_outgoing", "triangle_incoming", "transition")}
            assert pair_half < layers["4 switch m 0"], "the MSA's way back lies under the whole pair half"
            assert "triangle_incoming 1" in layers["7 switch z 1"], (
                "the pair's switch lies under triangle multiplication"
            )
            for bias in ("1 row_attention 0", "10 attention_starting 0", "12 attention_ending 1"):
                assert collectives[bias].hidden > 0


def test_compute_is_what_lies_between_waits() -> None:
    """Waiting that is drawn as compute would look like a collective that is hidden."""
    pieces = [("a", 0, 10), ("b", 10, 20)]
    found = list(trace._without(pieces, [(2, 4), (8, 12), (20, 30)]))
    assert found == [("a", 0, 2), ("a", 4, 8), ("b", 12, 20)]


def test_a_long_protein_gives_the_same_numbers_for_less_memory(pool: RankPool) -> None:
    """Ranks that look light because they compute something else."""
    one = long_protein.measured(LocalExchange(), 40, True)
    for found in pool.run(2, long_protein_on_rank):
        assert found["plddt logits"] == pytest.approx(one["plddt logits"], rel=1e-5)
        assert found["tensors"] < 0.8 * one["tensors"]


def long_protein_on_rank(handle: Any) -> dict[str, Any]:
    return long_protein.measured(ShardedExchange(Group(handle)), 40, True)
