"""A prediction is followed as it runs: any number of blocks and pieces needs what the few that are followed need."""

from __future__ import annotations

import dataclasses

import pytest

from evodsp.config import ModelConfig
from evodsp.planner.device import load_device
from evodsp.planner.prediction import HEAP, PlannedPrediction, prediction_memory, prediction_times
from evodsp.planner.program import PlannedStep, SampleSizes, program
from evodsp.planner.trace import Operation

SIZES = SampleSizes(48, 12, 20)


def model(blocks: int = 6) -> ModelConfig:
    config = ModelConfig.preset("test")
    stack = dataclasses.replace(config.evoformer, blocks=blocks, checkpoint=True)
    return dataclasses.replace(config, evoformer=stack)


def one_of_each() -> ModelConfig:
    """The preset with one block of each stack and one iteration: without gradients, further ones need the same memory."""
    preset = ModelConfig.preset("model_1_ptm")
    stacks = {
        name: dataclasses.replace(getattr(preset, name), blocks=1) for name in ("extra_msa", "evoformer", "templates")
    }
    return dataclasses.replace(
        preset, **stacks, structure_module=dataclasses.replace(preset.structure_module, iterations=1)
    )


def most(step: PlannedStep) -> int:
    return max(event.live for event in program(step).events if isinstance(event, Operation))


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.verify)])
def test_memory_does_not_grow_with_blocks_but_time_does(ranks: int) -> None:
    """Catches memory of repeated blocks that is added up, as of a training step, or blocks that take no time."""
    six, nine = (PlannedPrediction(model(blocks), SIZES, ranks=ranks, memory=1 << 16) for blocks in (6, 9))
    few, more = prediction_memory(six), prediction_memory(nine)
    assert (few.pair, few.msa, few.layers, few.at) == (more.pair, more.msa, more.layers, more.at)
    assert more.weights > few.weights
    device = load_device("h100")
    flops = [prediction_times(PlannedPrediction(model(n), SIZES, ranks=ranks), device).flops for n in (6, 9, 12)]
    assert flops[2] - flops[1] == flops[1] - flops[0] > 0


@pytest.mark.verify
def test_two_pieces_show_the_memory_of_all() -> None:
    """Catches pieces that are left out although they decide the peak: the first ones are the largest."""
    step = PlannedStep(model(1), SIZES, half=False, memory=1 << 14)
    assert most(dataclasses.replace(step, samples=2)) == most(step)
    assert most(dataclasses.replace(step, samples=2)) < most(dataclasses.replace(step, memory=None))


@pytest.mark.verify
def test_less_memory_with_what_the_options_change() -> None:
    """Catches an option that the estimate does not see: ranks, working memory, ensembles, passes."""
    base = PlannedPrediction(model(1), SIZES, memory=1 << 16)
    total = prediction_memory(base).total

    def changed(**values: object) -> int:
        return prediction_memory(dataclasses.replace(base, **values)).total  # type: ignore[arg-type]

    assert changed(ranks=2) < total
    assert changed(memory=None) > total
    assert changed(ensembles=2) > total
    assert changed(passes=1) == total
    assert changed(graphs=True, passes=3) > changed(passes=3), "a recorded pass keeps its memory"
    on_cpu = prediction_memory(dataclasses.replace(base, on_gpu=False, passes=1))
    assert on_cpu.total - on_cpu.heap == total, "its features are in the same memory"
    assert changed(on_gpu=False) > on_cpu.total


def test_a_heap_keeps_half_of_what_it_may_keep() -> None:
    """Catches the free memory that a C library keeps left out of a CPU's estimate, or counted for a GPU, or more of it than
    was ever in use."""
    base = PlannedPrediction(model(1), SIZES, memory=1 << 16)
    on_cpu = dataclasses.replace(base, on_gpu=False)
    assert prediction_memory(base).heap == 0
    small = prediction_memory(on_cpu)
    assert small.heap == small.pair + small.msa + small.layers < HEAP
    assert prediction_memory(dataclasses.replace(on_cpu, sizes=SampleSizes(300, 4, 6))).heap == HEAP


@pytest.mark.verify
def test_a_further_feature_set_takes_the_time_of_the_second() -> None:
    """Catches ensembles whose later sets are free."""
    device = load_device("h100")
    flops = [prediction_times(PlannedPrediction(model(), SIZES, ensembles=n), device).flops for n in (1, 2, 4)]
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0]) > 0


def test_no_part_needs_more_than_the_evoformer() -> None:
    """Catches a whole copy of the pair representation in single precision, in the structure module or for the confidences."""
    what = PlannedPrediction(one_of_each(), SampleSizes(3000, 64, 64, 0), passes=1, half=True, memory=1 << 30)
    found = prediction_memory(what)
    assert found.at == "evoformer"
    assert found.layers < 1.6 * found.pair  # the product of a triangle multiplication is as large


@pytest.mark.verify
def test_four_templates_need_the_memory_of_one() -> None:
    """Catches embedded templates that are kept until the last one is there: each is half as large as the pair."""
    one, four = (
        prediction_memory(
            PlannedPrediction(one_of_each(), SampleSizes(3000, 64, 64, count), passes=1, half=True, memory=1 << 26)
        )
        for count in (1, 4)
    )
    assert one.at == four.at == "template embedder"
    assert four.layers < 1.02 * one.layers < 1.8 * one.pair


@pytest.mark.parametrize(("ranks", "most"), [pytest.param(2, 2.2, marks=pytest.mark.verify), (8, 2.6)])
def test_a_rank_of_several_holds_its_shard_of_the_pair_once(ranks: int, most: float) -> None:
    """Catches a second shard: an argument, a switch or the recycled representation that is held while a layer runs.

    A second one is the product of a triangle multiplication. What is on its way between ranks comes on top.
    """
    what = PlannedPrediction(
        ModelConfig.preset("model_1_ptm"), SampleSizes(6000, 64, 64, 0), passes=1, ranks=ranks, half=True
    )
    found = prediction_memory(dataclasses.replace(what, memory=1 << 28))
    assert found.pair + found.layers < most * found.pair


@pytest.mark.verify
def test_gathered_biases_do_not_outgrow_the_budget() -> None:
    """Catches the whole pair bias of row attention on every rank, which among many ranks is larger than all else."""
    what = PlannedPrediction(one_of_each(), SampleSizes(3000, 64, 64, 0), passes=1, ranks=64, half=True)
    whole_bias = 3000**2 * 8 * 2
    found, unlimited = (prediction_memory(dataclasses.replace(what, memory=memory)) for memory in (1 << 24, None))
    assert unlimited.layers > 2 * whole_bias
    assert found.layers < 1.5 * whole_bias  # of which half is what a triangle multiplication sends and receives
