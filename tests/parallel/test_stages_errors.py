"""Mistakes in calls of `parallelize`: each is one line that says where, what was found, what was expected, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.parallel import Stage, parallelize
from tests.builders.axial import WIDTH, Attention, built, numbers
from tests.ranks import RankPool

AXES = "batch time space channel"
INPUT = (2, 5, 7, WIDTH)
STAGES: dict[str, str | Stage] = {"blocks.*.time": "time", "blocks.*.space": "space"}


class Masked(nn.Module):
    """Attention along one dimension, with an argument that a test may pass, and a result that it may replace."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim)
        self.mask: Any = None
        self.returned: Callable[[Tensor], Any] = lambda x: x

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        return self.returned(self.attention(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Masked(1), Masked(2)

    def forward(self, x: Tensor) -> Any:
        for stage in (self.time, self.space):
            x = x + stage(x, mask=stage.mask)
        return x


class Model(nn.Module):
    """Two blocks, and a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.pointwise, self.smooth = (
            nn.Conv3d(1, 1, 1),
            nn.Conv3d(1, 1, (1, 1, 3)),
        )  # outside of the region of most tests
        self.between: Callable[[Tensor], Any] = lambda x: x

    def forward(self, x: Any) -> Any:
        return self.blocks[1](self.between(self.blocks[0](x)))


def made(handle: Any, stages: Mapping[str, str | Stage] = STAGES, layout: str = AXES, **options: Any) -> Any:
    """A parallel model."""
    model, _ = built(Model())
    return parallelize(model, handle, layout, stages, **{"region": "blocks", **options})


def with_stage(handle: Any, **options: Any) -> Any:
    """A parallel model whose stages along time have these options."""
    return made(handle, {**STAGES, "blocks.*.time": Stage("time", **options)})


def answer(handle: Any, mistake: str) -> str:
    """What a mistake is answered with."""
    of_call = partial(made, **DECLARATIONS[mistake][0]) if mistake in DECLARATIONS else CALLS[mistake][0]
    with pytest.raises(UserError) as error:
        of_call(handle)
    return str(error.value)


def twice(handle: Any) -> None:
    """A cell of a notebook that is run again."""
    parallelize(made(handle), handle, AXES, STAGES, region="blocks")


DECLARATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "an axis twice": (
        {"layout": "batch time time channel"},
        "the layout 'batch time time channel' names an axis twice; give every axis another name",
    ),
    "an axis that the layout lacks": (
        {"stages": {"blocks.*.time": "tiem"}},
        "stage blocks.*.time computes along 'tiem', but the layout has the axes batch, time, space, channel. "
        "Did you mean 'time'?",
    ),
    "a pattern without module": (
        {"stages": {"blocks.*.tim": "time"}},
        "no submodule is called blocks.*.tim. Did you mean 'blocks.1.time'?",
    ),
    "a module twice": (
        {"stages": {**STAGES, "blocks.0.time": "time"}},
        "submodule blocks.0.time matches two patterns, one of them blocks.0.time; name it once",
    ),
    "an axis to shard that the layout lacks": (
        {"shard": "spaces"},
        "shard is 'spaces', but the layout has the axes batch, time, space, channel. Did you mean 'space'?",
    ),
    "stages along one axis only": (
        {"stages": {"blocks.*.time": "time"}},
        "stages compute along time, and each of them needs the tensor whole; name the axis to shard with shard=, "
        "one of batch, time, space, channel",
    ),
    "stages along all axes": (
        {"stages": {"blocks.*.time": "time space", "blocks.*.space": Stage(whole={"mask": "time"})}},
        "stages compute along time, space, and each of them needs the tensor whole; name the axis to shard with shard=, "
        "one of batch, time, space, channel",
    ),
    "stages along no axis": (
        {"stages": {"blocks.*.time": Stage(whole={"mask": "time"})}},
        "stages compute along no axis; name the axis to shard with shard=, one of batch, time, space, channel",
    ),
    "a sharded argument that lacks an axis": (
        {"stages": {**STAGES, "blocks.*.time": Stage("time", sharded={"x": "batch time channel"})}},
        "stage blocks.0.time: the layout 'batch time channel' of argument x lacks the axis space, along which tensors are "
        "sharded; if every rank holds it whole, list it under `whole`",
    ),
    "a sharded result that lacks an axis": (
        {"stages": {**STAGES, "blocks.*.time": Stage("time", returns={1: "batch space"})}},
        "stage blocks.0.time: the layout 'batch space' of result 1 lacks the axis time, along which tensors are sharded; if "
        "every rank holds it whole, leave it out of `returns`",
    ),
    "a convolution outside of the stages": (
        {"stages": {"blocks.*.space": "space", "blocks.*.time": "time"}, "region": ""},
        "smooth is a Conv3d, which mixes positions, but no stage holds it; name it in the stages, with the axes along which it "
        "computes ('' if it gets positions one by one)",
    ),
    "a region that is no module": (
        {"region": "block"},
        "region: no submodule is called block. Did you mean 'blocks'?",
    ),
    "two regions, one of which is no module": (
        {"region": ("blocks", "smoth")},
        "region: no submodule is called smoth. Did you mean 'smooth'?",
    ),
    "a region of no modules": (
        {"region": ()},
        "region is empty; name at least one submodule, or leave it out, which stands for the whole model",
    ),
}


def a_size_that_changes_within_the_region(handle: Any) -> None:
    model = made(handle, shard="time")
    model.between = lambda x: x[:, :, :-1]
    model(numbers(*INPUT))


def a_region_that_returns_a_dictionary(handle: Any) -> None:
    model = made(handle, region="blocks.0")
    model.blocks[0].forward = lambda x: {"x": x}
    model(numbers(*INPUT))


def with_mask(handle: Any, mask: Any, **options: Any) -> None:
    model = with_stage(handle, **options or {"whole": {"mask": "time space"}})
    model.blocks[0].time.mask = mask
    model(numbers(*INPUT))


def returning(handle: Any, result: Callable[[Tensor], Any], **options: Any) -> None:
    model = with_stage(handle, **options)
    model.blocks[0].time.returned = result
    model(numbers(*INPUT))


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a model that is parallelized again": (
        twice,
        "region 'blocks' is parallelized already, with these stages; make the model anew to parallelize it again",
    ),
    "a tensor of another rank": (
        lambda handle: made(handle)(numbers(2, 5, WIDTH)),
        "argument 1 of region 'blocks' is a tensor of shape [2, 5, 4], but its layout 'batch time space channel' has 4 axes; "
        "give the layout of this tensor",
    ),
    "a list of tensors": (
        lambda handle: made(handle)([numbers(*INPUT)]),
        "argument 1 of region 'blocks' is of type list, but its layout 'batch time space channel' has 4 axes; give the layout "
        "of this tensor",
    ),
    "an argument that the region lacks": (
        lambda handle: made(handle, argument="y")(numbers(*INPUT)),
        "region 'blocks': its forward has no argument y, only x.",
    ),
    "an argument that the stage lacks": (
        lambda handle: with_stage(handle, whole={"masks": "time"})(numbers(*INPUT)),
        "stage blocks.0.time: its forward has no argument masks, only x, mask. Did you mean 'mask'?",
    ),
    "an argument that is not passed": (
        lambda handle: with_stage(handle, sharded={"mask": AXES})(numbers(*INPUT)),
        "stage blocks.0.time was called without its sharded argument; name it in Stage(sharded=...)",
    ),
    "a sharded argument that is no tensor": (
        lambda handle: with_mask(handle, 3, sharded={"mask": AXES}),
        "argument mask of stage blocks.0.time is of type int, but its layout 'batch time space channel' has 4 axes; give the "
        "layout of this tensor",
    ),
    "a stage before the region": (
        lambda handle: made(handle).blocks[1].time(numbers(*INPUT)),
        "argument 1 of stage blocks.1.time came before the region 'blocks' was entered; name the region whose input must be "
        "split",
    ),
    "a size that changes within the region": (
        a_size_that_changes_within_the_region,
        "argument 1 of stage blocks.1.time has the shape [2, 3, 6, 4], which is no shard of 'batch time space channel' with "
        "time 5, space 7; if code outside a stage adds its result to its input, the stage needs residual='outside'",
    ),
    "a region that returns a dictionary": (
        a_region_that_returns_a_dictionary,
        "region 'blocks.0' returned a dict, expected a tensor or a tuple; let it return one",
    ),
    "a mask of another rank": (
        lambda handle: with_mask(handle, torch.ones(7)),
        "argument mask of stage blocks.0.time is a tensor of shape [7], but its layout 'time space' has 2 axes; give the "
        "layout of this tensor",
    ),
    "a mask that is no tensor": (
        lambda handle: with_mask(handle, (torch.ones(7),)),
        "argument mask of stage blocks.0.time is of type tuple, but its layout 'time space' has 2 axes; give the "
        "layout of this tensor",
    ),
    "a mask that is a shard": (
        lambda handle: with_mask(handle, torch.ones(5, 3)),
        "argument mask of stage blocks.0.time has 3 positions along space, but the whole axis has 7; list arguments that every "
        "rank holds whole under `whole`",
    ),
    "a dictionary as result": (
        lambda handle: returning(handle, lambda x: {"x": x}),
        "stage blocks.0.time returned a dict, expected a tensor or a tuple; let it return one",
    ),
    "fewer results than declared": (
        lambda handle: returning(handle, lambda x: (x, x), returns={0: AXES, 2: AXES}),
        "stage blocks.0.time returned 2 items, but item 2 should be sharded; items count from 0",
    ),
    "a result of another size": (
        lambda handle: returning(handle, lambda x: x.mean(1, keepdim=True)),
        "the result of stage blocks.0.time has the shape [2, 1, 4, 4], which is no shard of 'batch time space channel' with "
        "time 5, space 7; if code outside a stage adds its result to its input, the stage needs residual='outside'",
    ),
}


@pytest.mark.parametrize("mistake", [*DECLARATIONS, *CALLS])
def test_mistakes(pool: RankPool, mistake: str) -> None:
    """Catches a declaration that is accepted and goes wrong later, tensors that are divided or switched although they are not
    what was declared, tracebacks in their place, and a message that does not say how to mend it."""
    _, expected = (DECLARATIONS | CALLS)[mistake]
    ranks = 1 if mistake in CALLS else 2  # sizes of shards differ
    assert pool.run(2, answer, mistake)[:ranks] == [expected] * ranks
