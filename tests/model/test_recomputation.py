"""Recomputation by number of blocks: the same gradients, less memory, and a number on which all ranks agree."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from evodsp.config import EvoformerConfig, ModelConfig, TemplateConfig
from evodsp.errors import UserError
from evodsp.model.casts import CastParameters
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.recomputation import Recomputation
from evodsp.model.templates import TemplatePairStack
from evodsp.parallel.exchange import LocalExchange
from evodsp.training.execution import AutomaticRecomputation, Measured, kept_blocks
from evodsp.training.world import World
from scripts.benchmarks.peak_memory import PeakMemory
from tests.builders.comparison import close
from tests.builders.sharded_stacks import Case, Stack, check, run
from tests.ranks import RankPool

BLOCKS = {"evoformer": 3, "extra": 3, "templates": 2}


@pytest.fixture
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("stack", BLOCKS)
def test_gradients_do_not_depend_on_the_number(stack: Stack) -> None:
    """Catches a block that is left out or runs twice at the border between recomputed and kept ones, and other dropout."""
    outputs, inputs, module = run(Case(stack, recompute=False), LocalExchange(), 1)
    expected = {**outputs, **inputs, **{name: p.grad for name, p in module.named_parameters()}}
    for number in (*range(1, BLOCKS[stack] + 1), "auto"):
        outputs, inputs, module = run(Case(stack, recompute=number), LocalExchange(), 1)
        found = {**outputs, **inputs, **{name: p.grad for name, p in module.named_parameters()}}
        for name, x in expected.items():
            close(found[name].detach(), x.detach(), f"{name}, {number} blocks recomputed")


@pytest.mark.parametrize("stack", ["evoformer", "extra"])
def test_ranks_recompute_some_blocks(pool: RankPool, stack: Stack) -> None:
    """Catches collectives that a border between recomputed and kept blocks loses, repeats or brings out of order."""
    check(pool, Case(stack, recompute=2), (3,))


def stack_of(checkpoint: Any, blocks: int = 4) -> EvoformerStack:
    config = dataclasses.replace(ModelConfig.preset("small").evoformer, blocks=blocks, checkpoint=checkpoint)
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


def test_what_is_kept_shrinks_with_the_number() -> None:
    """Catches a number that is taken for true or false, and `1`, which equals True in Python, for all blocks."""
    by_number = [kept(stack_of(number)) for number in (0, 1, 2, 3, 4)]
    assert by_number == sorted(by_number, reverse=True)
    assert len(set(by_number)) == 5
    assert kept(stack_of(False)) == by_number[0]
    assert kept(stack_of(True)) == kept(stack_of(99)) == by_number[4]


def test_auto_counts_what_a_block_keeps() -> None:
    """Catches weights or inputs counted as activations, and views counted twice: auto would keep far too few blocks."""
    stack = stack_of("auto")
    assert stack.recomputation.number == 3
    kept(stack)
    with_two, with_one = kept(stack_of(2)), kept(stack_of(3))
    assert stack.recomputation.bytes_of_block == pytest.approx(with_two - with_one, rel=0.1)
    stack.recomputation.keep(3)
    assert not stack.recomputation.auto
    assert kept(stack) == kept(stack_of(1))


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


def test_the_number_that_fits_on_every_rank() -> None:
    """Catches ranks that decide by themselves and then communicate in different orders, and a negative number."""
    ranks = [Measured(1000.0, (100, 10)), Measured(450.0, (90, 10)), Measured(700.0, (110, 10))]
    assert kept_blocks(ranks, [48, 4]) == [5, 2]  # 450 has room for four more of 110; 10 are left
    assert kept_blocks([Measured(1e6, (100, 10))], [48, 4]) == [48, 4]
    assert kept_blocks([Measured(-1.0, (100, 10))], [48, 4]) == [0, 4]  # what the first gives back, the second takes
    assert kept_blocks([Measured(0.0, (0, 0))], [0, 1]) == [0, 1]


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
    assert (module.stack.recomputation.number, module.stack.recomputation.auto) == (8, False)

    module = OneStack("cuda")
    module.stack.recomputation.bytes_of_block = 100
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 400)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 650)
    callback.on_train_start(SimpleNamespace(), module)
    for step, number in ((1, 7), (2, 5), (3, 5)):  # 0.9 x 1000 - 650 is room for two more
        callback.on_train_batch_end(SimpleNamespace(global_step=step, is_global_zero=True), module)
        assert module.stack.recomputation.number == number


def test_a_stack_without_blocks() -> None:
    """Catches a negative number of blocks."""
    assert Recomputation("auto", 0).number == 0
    assert TemplatePairStack(TemplateConfig(blocks=0, checkpoint="auto")).recomputation.blocks == 0
