"""`parallelize` with tensors of all shapes: any number of axes, in any order, of one position or fewer than there are ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.parallel import Stage, parallelize
from evodsp.parallel.testing import check
from tests.builders.axial import WIDTH, Attention, Built, Layer, built, kinds
from tests.ranks import RankPool

AXES = "batch time space channel"
STAGES = {"*.time": "time", "*.space": "space"}


def two_layers(*sizes: int) -> Built:
    """Layers of attention along time and space, for an input of these sizes."""
    layers = [Layer(time=Attention(1), space=Attention(2)) for _ in range(2)]
    return built(nn.Sequential(*layers), (2, *sizes, WIDTH))


def along_two_axes(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, STAGES)


def one_moment() -> Built:
    return two_layers(1, 7)


def one_place() -> Built:
    return two_layers(5, 1)


def one_position() -> Built:
    return two_layers(1, 1)


def fewer_than_ranks() -> Built:
    return two_layers(2, 3)


def two_by_two() -> Built:
    return two_layers(2, 2)


@pytest.mark.parametrize("build", [one_moment, one_place, one_position, fewer_than_ranks, two_by_two])
def test_small_axes(pool: RankPool, build: Any) -> None:
    """Catches an axis of one position that is divided (ranks without any would divide by zero in a mean, and states of equal
    shapes would be confused), and empty shards that break a collective or a gradient."""
    check(*build(), along_two_axes, (3, 4), run=pool.run)


def six_axes() -> Built:
    model = Layer(time=Attention(4), row=Attention(3), planes=Attention(1, 2))
    return built(nn.Sequential(model), (2, 3, 2, 5, 4, WIDTH))


def along_four_axes(model: nn.Module, mesh: Any) -> None:
    stages = {"0.time": "time", "0.row": "row", "0.planes": "plane depth"}
    parallelize(model, mesh, "batch plane depth row time channel", stages)


def test_a_tensor_of_six_dimensions(pool: RankPool) -> None:
    """Catches dimensions that are counted as if there were four, and a stage along two axes that is given one of them whole."""
    check(*six_axes(), along_four_axes, (2, 3), run=pool.run)


class Convolutions(nn.Module):
    """Convolutions along time and space of [C, T, S]: no batch, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0))
        self.space = nn.Conv2d(WIDTH, WIDTH, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(x).tanh()
        return x + self.space(x).tanh()


def channels_first() -> Built:
    return built(nn.Sequential(Convolutions(), Convolutions()), (WIDTH, 5, 7))


def along_the_last_axes(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, "channel time space", STAGES)


def test_channels_may_come_first_and_a_batch_is_not_needed(pool: RankPool) -> None:
    """Catches an order of axes that is taken for granted: a batch in front, channels at the end."""
    check(*channels_first(), along_the_last_axes, (2, 3), run=pool.run)


def with_a_global_stage() -> Built:
    layers = [Layer(time=Attention(1), everything=Attention(1, 2), space=Attention(2)) for _ in range(2)]
    return built(nn.Sequential(*layers), (2, 5, 7, WIDTH))


def gathered_for_it(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {**STAGES, "*.everything": "time space"})


class Within(nn.Module):
    """A stage that holds its residual connection."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return x + self.stage(x)


def with_a_global_block() -> Built:
    stages = [Attention(1), Attention(1, 2), Attention(2)]
    return built(nn.Sequential(*[Within(stage) for stage in stages + stages[:1]]), (2, 5, 7, WIDTH))


def gathered_and_left_whole(model: nn.Module, mesh: Any) -> None:
    along = ["time", "time space", "space", "time"]
    parallelize(model, mesh, AXES, {str(n): Stage(axes, residual="inside") for n, axes in enumerate(along)})


@pytest.mark.parametrize(
    ("build", "parallel"), [(with_a_global_stage, gathered_for_it), (with_a_global_block, gathered_and_left_whole)]
)
def test_a_stage_along_all_axes(pool: RankPool, build: Any, parallel: Any) -> None:
    """Catches a missing line of the paper's table 2: from a shard to the whole tensor, and back to a shard."""
    check(*build(), parallel, (2, 3), run=pool.run)


def test_what_a_stage_along_all_axes_costs(pool: RankPool) -> None:
    """Catches communication beyond the paper's table 2: a split costs nothing, a result that stays whole is not gathered.

    Blocks along time, time and space, space, time: one gather for the second; the third splits along time; a switch to
    space before the fourth; and the gather at the end.
    """
    expected = ["all-gather", "all-to-all", "all-gather"]
    assert pool.run(2, kinds, with_a_global_block, gathered_and_left_whole) == [expected] * 2


def memory_of_shards(handle: Any) -> list[tuple[int, int]]:
    """Numbers that each stage's input has, and that its memory holds."""
    model, (x,) = two_layers(5, 7)
    along_two_axes(model, handle)
    found = []
    for layer in model:
        for stage in (layer.time, layer.space):
            hook = lambda _, args: found.append((args[0].numel(), args[0].untyped_storage().size() // 8))  # noqa: E731
            stage.register_forward_pre_hook(hook)
    model(x)
    return found


def test_a_shard_does_not_keep_the_whole_tensor_in_memory(pool: RankPool) -> None:
    """Catches a shard that is a view: what autograd saves of it would keep the whole input of the region on every rank."""
    for found in pool.run(2, memory_of_shards):
        assert len(found) == 4
        assert all(own == held for own, held in found)


def with_an_empty_axis(handle: Any) -> Tensor:
    """The parallel model's output for an empty time axis."""
    model, (x,) = two_layers(0, 3)
    along_two_axes(model, handle)
    with torch.no_grad():
        return model(x)


def test_an_axis_without_positions(pool: RankPool) -> None:
    """Catches a division of an empty axis: batches that a loader left empty must pass, as they do on one device."""
    for found in pool.run(2, with_an_empty_axis):
        assert found.shape == (2, 0, 3, WIDTH)
