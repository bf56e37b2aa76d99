"""`evodsp.parallel.testing.check`: what it finds, how it says so, and that it leaves nothing running."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.parallel import Group, gather, parallelize, split, total
from evodsp.parallel.testing import check
from scripts.examples import check_parallel
from tests.builders.axial import WIDTH, Attention, Layer, numbers
from tests.ranks import RankPool

AXES = "batch time space channel"
INPUT = numbers(2, 5, 7, WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(time=Attention(1), space=Attention(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


STAGES = {"blocks.*.time": "time", "blocks.*.space": "space"}
right = partial(parallelize, layout=AXES, stages=STAGES, region="blocks")


def test_what_agrees_is_said(pool: RankPool) -> None:
    """Catches a comparison that passes because nothing was compared, or nothing sharded."""
    said = check(Model(), (INPUT,), right, run=pool.run)
    assert (
        said
        == "2, 3, 4 ranks compute what one device does: 1 outputs, 21 gradients; sharded were axes of 5, 7 positions"
    )
    alone = check(Model(), (INPUT,), nothing, (2,), run=pool.run)
    assert alone.endswith("1 outputs, 21 gradients; sharded were NO axis of a module's result")


def nothing(model: nn.Module, group: Group) -> None:
    """A program that forgot to call `parallelize`."""


class Rows(nn.Module):
    """A row-parallel product: each rank has a part of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def rows(model: Rows, group: Group, forget: bool) -> Any:
    def form(x: Tensor) -> Tensor:
        part = split(x, -1, group) @ split(model.weight, 0, group)
        return part if forget else total(part, group)

    return form


def loss(x: Tensor) -> Tensor:
    return x.square().mean()


def loss_of_shard(model: Any, group: Group, factor: bool) -> Any:
    return lambda x: (group.size if factor else 1) * split(x, 1, group).square().sum() / x.numel()


def only_first(model: nn.Module, group: Group) -> Any:
    """Every rank's output is right, but the gradient stays on rank 0."""
    return lambda x: model(x if group.rank == 0 else x.detach())


def of_other_shape(model: nn.Module, group: Group) -> Any:
    return lambda x: split(model(x), 1, group)[:, :1]


def with_nan(model: nn.Module, group: Group) -> Any:
    return lambda x: model(x).masked_fill(torch.arange(3) == group.rank, torch.nan)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(time=Attention(1), space=Attention(2), dropout=nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


OF_LAYER = partial(parallelize, layout=AXES, stages={"layer.time": "time", "layer.space": "space"}, region="layer")
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[int, ...], Any, int, str]] = {
    # Gradients that are not compared: of both mistakes of the example the outputs are right.
    "reduce-scatter": (
        check_parallel.Layer,
        (1, 7, 4),
        partial(check_parallel.Sharded, plant="reduce-scatter"),
        2,
        r"on 2 ranks, the gradient of keys\.\w+: .* The backward pass is right up to query\.weight: ",
    ),
    "mean": (
        check_parallel.Layer,
        (1, 7, 4),
        partial(check_parallel.Sharded, plant="mean"),
        2,
        r"on 2 ranks, the gradient of summary\.\w+: .*; all of it is 2 times too large: 1/N is forgotten, .* "
        r"The backward pass is right up to gate\.weight: ",
    ),
    # A missing sum whose output has the right shape, and a report that does not say that only the sum is missing.
    "a part of a sum": (
        Rows,
        (2, 6),
        partial(rows, forget=True),
        2,
        r"the sum over ranks is right: a reduce-scatter or an all-reduce is missing",
    ),
    # The forgotten factor N of a shard's loss.
    "a loss without its factor": (
        lambda: loss,
        (2, 5),
        partial(loss_of_shard, factor=False),
        2,
        r"on 2 ranks, output 0: .*; all of it is 1/2 of that: a sum over ranks is missing",
    ),
    # A report that leaves out which ranks have no gradient.
    "a gradient that some ranks lack": (
        lambda: nn.Linear(4, 4),
        (2, 4),
        only_first,
        3,
        r"gradient of argument 0: .*all of it is 1/3 .*it is zero on ranks \[1, 2\]",
    ),
    # Shards that make up no whole, and NaN, which no comparison calls larger than a tolerance.
    "another shape": (
        lambda: nn.Linear(4, 3),
        (5, 4),
        of_other_shape,
        2,
        r"output 0: shapes \[\[5, 1\], \[5, 1\]\] on the ranks, expected \[5, 3\] or its shards",
    ),
    "nan": (lambda: nn.Linear(4, 3), (5, 4), with_nan, 2, "nan at"),
    # Masks that differ between numbers of ranks and go unnoticed because both runs are in evaluation mode.
    "torch's dropout": (Dropped, INPUT.shape, OF_LAYER, 2, r"The first module that differs is layer\.dropout "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(pool: RankPool, name: str) -> None:
    """Catches what the table says above each mistake."""
    model, shape, sharded, ranks, said = MISTAKES[name]
    with pytest.raises(AssertionError, match=said):
        check(model(), (numbers(*shape),), sharded, (ranks,), run=pool.run)


def test_what_is_right_is_accepted(pool: RankPool) -> None:
    """Catches a loss that is refused because ranks have losses of their own."""
    check(Rows(), (numbers(2, 6),), partial(rows, forget=False), run=pool.run)
    check(loss, (numbers(2, 5),), partial(loss_of_shard, factor=True), run=pool.run)
    check(Dropped().eval(), (INPUT,), OF_LAYER, (2,), run=pool.run)


def one_forgotten(model: nn.Module, group: Group) -> None:
    """Attention along time of blocks.1 sees this rank's moments only."""
    parallelize(model, group, AXES, {"blocks.*.space": "space", "blocks.0.time": "time"}, region="blocks", shard="time")


def test_the_first_module_is_named(pool: RankPool) -> None:
    """Catches a report of the last module or of the first leaf in the model's order: the culprit is the attention that runs on
    shards of the axis that it mixes, and what it contains is right until it mixes."""
    with pytest.raises(AssertionError) as error:
        check(Model(), (INPUT,), one_forgotten, (3,), run=pool.run)
    said = str(error.value)
    assert re.match(r"on 3 ranks, output 0: \S+ at \[.*\] of \[2, 5, 7, 4\] on rank \d, expected", said)
    assert "The first module that differs is blocks.1.time.out (call 1, result 0): " in said
    assert said.endswith("(shards along dimension 2 of [2, 7, 5, 4])")


def absent(model: nn.Module, group: Group) -> Any:
    """Rank 0 gathers, and rank 1 takes no part."""

    def form(x: Tensor) -> Tensor:
        if group.rank == 0:
            gather(split(x.detach(), 1, group), 1, x.shape[1], group)
        return model(x)

    return form


def failing(model: nn.Module, group: Group) -> Any:
    def form(x: Tensor) -> Tensor:
        if group.rank == 1:
            raise ValueError("on purpose")
        return gather(split(model(x), 1, group), 1, 3, group)

    return form


@pytest.mark.verify_but("failing*")
@pytest.mark.parametrize(
    ("sharded", "kind", "said", "timeout"),
    [
        (
            absent,
            TimeoutError,
            r"on 2 ranks, rank 0 waits in form \(.*test_testing\.py:\d+\) for another, which takes no part in",
            6.0,
        ),
        (
            failing,
            RuntimeError,
            r"on 2 ranks, rank 1 failed in form \(.*test_testing\.py:\d+\): (.*\n)*.*ValueError: on purpose",
            120.0,  # it fails at once, but a busy machine starts its ranks seconds apart
        ),
    ],
)
def test_ranks_that_hang_or_fail_end(sharded: Any, kind: type[Exception], said: str, timeout: float) -> None:
    """Catches a comparison that waits for ever, that does not say where, ranks that need the pool of these tests, and processes
    that stay behind."""
    before = set(multiprocessing.active_children())
    with pytest.raises(kind, match=said):
        check(nn.Linear(4, 3), (numbers(5, 4),), sharded, (1, 2), timeout=timeout)  # one rank agrees
    assert set(multiprocessing.active_children()) <= before


def test_what_cannot_be_sent_is_one_line() -> None:
    """Catches a traceback for a lambda."""
    with pytest.raises(
        UserError, match=r"go to processes of their own, but .*lambda.*; define classes and functions at the top"
    ):
        check(nn.Linear(4, 3), (numbers(5, 4),), lambda model, group: model, (2,))


def test_the_model_and_its_example_stay_as_they_were(pool: RankPool) -> None:
    """Catches a check in the middle of a program that leaves random weights, double precision, or gradients behind."""
    model, x = nn.Linear(4, 3), torch.ones(5, 4)
    before = model.weight.detach().clone()
    check(model, (x,), nothing, (2,), run=pool.run)
    assert torch.equal(model.weight, before)
    assert (x.requires_grad, x.dtype, model.weight.grad, torch.get_default_dtype()) == (
        False,
        torch.float32,
        None,
        torch.float32,
    )
