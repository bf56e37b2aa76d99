"""Recomputation of blocks and of projections: the same gradients, less memory, and numbers on which all ranks agree."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from evodsp.config import EvoformerConfig, ModelConfig, TemplateConfig
from evodsp.errors import UserError
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.kernels import reference
from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.model.recomputation import Recomputation, Recomputed
from evodsp.model.schedule import CommunicationPlan
from evodsp.model.templates import TemplatePairStack
from evodsp.parallel.exchange import LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, Ledger
from evodsp.parallel.testing import _in_double as in_double
from evodsp.parallel.testing import dense
from evodsp.training.execution import AutomaticRecomputation, Measured, least_recomputed
from evodsp.training.world import World
from scripts.benchmarks.peak_memory import PeakMemory
from tests.builders.comparison import close
from tests.builders.sharded_stacks import Case, Stack, check, run
from tests.ranks import RankPool

BLOCKS = {"evoformer": 3, "extra": 3, "templates": 2}
STACKS: tuple[Stack, ...] = ("evoformer", "extra", "outer_first", "outer_first_extra", "templates")


def one_device(case: Case) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of inputs and parameters."""
    outputs, inputs, module = in_double(run, case, LocalExchange(), 1)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**{name: x.detach() for name, x in outputs.items()}, **inputs, **gradients}


@pytest.mark.verify_but("extra", "templates")
@pytest.mark.parametrize("stack", BLOCKS)
def test_gradients_do_not_depend_on_the_number(stack: Stack) -> None:
    """Catches a block that is left out or runs twice at the border between recomputed and kept ones, and other dropout."""
    expected = one_device(Case(stack, recompute=False))
    for number in (*range(1, BLOCKS[stack] + 1), "auto"):
        found = one_device(Case(stack, recompute=number))
        for name, x in expected.items():
            close(found[name], x, f"{name}, {number} blocks recomputed")


@pytest.mark.verify_but("evoformer-plan0", "outer_first_extra-plan1", "templates-plan0")
@pytest.mark.parametrize("plan", [CommunicationPlan(), CommunicationPlan(stream_bias=True)])
@pytest.mark.parametrize("stack", STACKS)
def test_gradients_of_projections_that_are_computed_again(stack: Stack, plan: CommunicationPlan) -> None:
    """Catches other numbers or another order of sums than of projections that were kept: of a gate left out, of other rows."""
    expected = one_device(Case(stack, recompute=0, projections=False, plan=plan))
    for whole, projections in ((0, True), (0, 1), (1, 1)):
        found = one_device(Case(stack, recompute=whole, projections=projections, plan=plan))
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(found[name], x), f"{name}, {whole} blocks, projections of {projections}"


@pytest.mark.verify_but("extra")
@pytest.mark.parametrize("stack", ["evoformer", "extra"])
def test_ranks_recompute_some_blocks(pool: RankPool, stack: Stack) -> None:
    """Catches collectives that a border between recomputed and kept blocks loses, repeats or brings out of order."""
    check(pool, Case(stack, recompute=2), (3,))


@pytest.mark.verify_but("templates", "evoformer")
@pytest.mark.parametrize("stack", STACKS)
def test_ranks_recompute_projections(pool: RankPool, stack: Stack) -> None:
    """Catches projections of another rank's shard, or of a shard on another axis."""
    check(pool, Case(stack, recompute=1, projections=True), (2, 3))


def test_projections_are_computed_again_without_a_collective(pool: RankPool) -> None:
    """Catches a gather or a switch in the backward pass that only the forward pass needs."""
    for kept, again in zip(*(pool.run(2, sent, projections) for projections in (False, True)), strict=True):
        assert kept == again
        assert {phase for phase, _ in kept} == {"forward", "backward"}


def sent(handle: Any, projections: bool) -> list[tuple[str, str]]:
    """Phases and kinds of a rank's collectives."""
    ledger = Ledger()
    in_double(run, Case("evoformer", projections=projections), ShardedExchange(Group(handle, ledger)), 2)
    return [(entry.phase, entry.kind) for entry in ledger.entries]


def test_operators_that_keep_parts_of_the_projections() -> None:
    """Catches a kernel that keeps queries, keys, values and gates one by one, and gets the numbers of another one; and a
    backward pass without the forward pass's autocast."""

    def mixing(projected: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """It keeps four views."""
        q, k, v, gate = projected.unbind(3)
        return (q * k).sin() + v * gate

    kernels = Kernels.of(reference).replaced(attention=mixing, biased_attention=mixing)
    found = []
    for projections in (False, True):
        stack = dense(stack_of(False, blocks=2, projections=projections)).float()
        use_kernels(stack, kernels)
        m, z = (
            torch.linspace(-1, 1, n * 20 * c).sin().view(1, n, 20, c).requires_grad_() for n, c in ((6, 32), (20, 16))
        )
        with torch.autocast("cpu", torch.bfloat16):
            results = stack(m, z, torch.ones(1, 6, 20), torch.ones(1, 20, 20))
        wanted, loss = [m, z, *stack.parameters()], sum(x.float().square().sum() for x in results)
        found.append(torch.autograd.grad(loss, wanted, materialize_grads=True))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def stack_of(checkpoint: Any, blocks: int = 4, projections: bool | int = False) -> EvoformerStack:
    config = dataclasses.replace(
        ModelConfig.preset("small").evoformer, blocks=blocks, checkpoint=checkpoint, checkpoint_projections=projections
    )
    torch.manual_seed(0)
    return EvoformerStack(32, 16, config)


def kept(stack: EvoformerStack) -> int:
    """Bytes that are alive after the forward pass."""
    m, z = torch.randn(1, 6, 20, 32, requires_grad=True), torch.randn(1, 20, 20, 16, requires_grad=True)
    masks = torch.ones(1, 6, 20), torch.ones(1, 20, 20)
    with PeakMemory() as memory:
        results = stack(m, z, *masks)
        alive = memory.current
    del results
    return alive


@pytest.mark.verify
def test_what_is_kept_shrinks_with_the_number() -> None:
    """Catches a number that is taken for true or false, and `1`, which equals True in Python, for all blocks."""
    by_number = [kept(stack_of(number)) for number in (0, 1, 2, 3, 4)]
    assert by_number == sorted(by_number, reverse=True)
    assert len(set(by_number)) == 5
    assert kept(stack_of(False)) == by_number[0]
    assert kept(stack_of(True)) == kept(stack_of(99)) == by_number[4]
    by_projections = [kept(stack_of(0, projections=number)) for number in (0, 1, 2, 3, 4)]
    assert by_projections == sorted(by_projections, reverse=True)
    assert len(set(by_projections)) == 5
    assert kept(stack_of(0, projections=True)) == by_projections[4]
    assert by_number[4] < kept(stack_of(2, projections=True)) < by_projections[4]


def test_auto_counts_what_a_block_keeps() -> None:
    """Catches weights or inputs counted as activations, and views counted twice: auto would keep far too few blocks."""
    stack = stack_of("auto")
    assert stack.recomputation.chosen == Recomputed(3)
    kept(stack)
    with_two, with_one = kept(stack_of(2)), kept(stack_of(3))
    assert stack.recomputation.bytes_of_block == pytest.approx(with_two - with_one, rel=0.1)
    less = kept(stack_of(2, projections=1))
    assert stack.recomputation.bytes_of_projections == pytest.approx(with_two - less, rel=0.02)
    stack.recompute(Recomputed(1, 2))
    assert not stack.recomputation.auto
    assert kept(stack) == kept(stack_of(1, projections=2))


def test_auto_does_not_count_casts_of_weights() -> None:
    """Catches the flat buffer of all parameters in half precision counted as what a block keeps."""
    counts = []
    for cast in (False, True):
        stack = stack_of("auto")
        casts = CastParameters(stack)
        with torch.autocast("cpu", torch.bfloat16):
            if cast:
                casts.make()
            kept(stack)
        counts.append(stack.recomputation.bytes_of_block)
    assert counts[1] <= counts[0]


def test_the_numbers_that_fit_on_every_rank() -> None:
    """Catches ranks that decide by themselves and then communicate in different orders, and a negative number."""
    none = (0, 0)
    ranks = [Measured(1000.0, (100, 10), none), Measured(450.0, (90, 10), none), Measured(700.0, (110, 10), none)]
    # 450 has room for four more of 110; 10 are left
    assert least_recomputed(ranks, [48, 4]) == [Recomputed(43), Recomputed(2)]
    # What the first gives back, the second takes.
    assert least_recomputed([Measured(-1.0, (100, 10), none)], [48, 4]) == [Recomputed(48), Recomputed(0)]
    assert least_recomputed([Measured(0.0, none, none)], [0, 1]) == [Recomputed(0), Recomputed(0)]


def test_projections_are_recomputed_before_blocks() -> None:
    """Catches a block that is recomputed whole although its projections suffice, and room for projections that is left."""

    def chosen(room: int) -> list[tuple[int, ...]]:
        ranks = [Measured(float(room), (100, 10), (50, 5)), Measured(room + 1.0, (90, 9), (40, 5))]
        return [tuple(one) for one in least_recomputed(ranks, [48, 4])]

    assert chosen(10**6) == [(0, 0), (0, 0)]
    assert chosen(47 * 100 + 3 * 10) == [(0, 0), (0, 0)]
    assert chosen(47 * 100 + 3 * 10 - 1) == [(0, 0), (0, 1)]
    assert chosen(47 * 50 + 3 * 5) == [(0, 47), (0, 3)]  # the ones that were measured keep theirs
    assert chosen(47 * 50 - 1) == [(1, 46), (0, 0)]
    assert chosen(-1) == [(48, 0), (0, 0)]


@pytest.mark.parametrize("wrong", [-1, 1.5, "some", None])
def test_a_wrong_number_is_named(wrong: Any) -> None:
    """Catches a typing error that turns recomputation off."""
    stack, templates = EvoformerConfig(), TemplateConfig()
    for settings in (stack, templates):
        object.__setattr__(settings, "checkpoint", wrong)  # past the type checks that only tests have
    with pytest.raises(UserError, match=r"model.evoformer.checkpoint is .*true, false, auto, or a number of blocks"):
        ModelConfig(evoformer=stack)
    with pytest.raises(UserError, match=r"model.templates.checkpoint"):
        ModelConfig(templates=templates)
    projections = EvoformerConfig()
    object.__setattr__(projections, "checkpoint_projections", wrong)
    with pytest.raises(
        UserError, match=r"model.evoformer.checkpoint_projections is .*true, false, or a number of blocks"
    ):
        ModelConfig(evoformer=projections)


class OneStack(LightningModule):
    """A model of one stack on a device of this type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stack, self.kind, self.world = stack_of("auto", blocks=8), kind, World()

    @property
    def device(self) -> Any:
        return torch.device(self.kind)


def test_the_decision_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a decision before Adam's state exists, from memory that other processes have, or more than once; and a run on a
    CPU that waits for a decision for ever."""
    callback, module = AutomaticRecomputation(), OneStack("cpu")
    callback.on_train_start(SimpleNamespace(), module)
    assert (module.stack.recomputation.chosen, module.stack.recomputation.auto) == (Recomputed(8), False)
    for compiled, numbers in ((False, Recomputed(1, 6)), (True, Recomputed(5))):
        check_decision(monkeypatch, AutomaticRecomputation(projections=not compiled), numbers)


def check_decision(monkeypatch: pytest.MonkeyPatch, callback: AutomaticRecomputation, numbers: Recomputed) -> None:
    module = OneStack("cuda")
    module.stack.recomputation.bytes_of_block, module.stack.recomputation.bytes_of_projections = 100, 60
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 400)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 650)
    callback.on_train_start(SimpleNamespace(), module)
    # 0.9 x 1000 - 650 is room for two more blocks; or for six without their projections.
    for step, expected in ((1, Recomputed(7)), (2, numbers), (3, numbers)):
        callback.on_train_batch_end(SimpleNamespace(global_step=step, is_global_zero=True), module)
        assert module.stack.recomputation.chosen == expected
    again = [block.msa_stack.projects_again for block in module.stack.blocks]
    assert again == [number in range(numbers.blocks, sum(numbers)) for number in range(8)]


def test_a_stack_without_blocks() -> None:
    """Catches a negative number of blocks."""
    assert Recomputation("auto", False, 0).chosen == Recomputed(0)
    assert TemplatePairStack(TemplateConfig(blocks=0, checkpoint="auto")).recomputation.blocks == 0
