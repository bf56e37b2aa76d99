"""Mistakes in calls of `parallelize`: each is one line that says where, what was found, what was expected, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def message(handle: Any, mistake: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """What a mistake is answered with."""
    with pytest.raises(UserError) as error:
        mistake(handle, *arguments, **options)
    return str(error.value)


def declaration(handle: Any, options: dict[str, Any]) -> str:
    return message(handle, made, **options)


def twice(handle: Any) -> str:
    """A cell of a notebook that is run again."""
    model = made(handle)
    return message(handle, lambda _: parallelize(model, handle, AXES, STAGES, region="blocks"))


def test_a_model_that_is_parallelized_again(pool: RankPool) -> None:
    """Catches the second call's hooks on what the first has sharded: a wrong result, or a message about something else."""
    assert all("region 'blocks' is parallelized already" in said for said in pool.run(2, twice))


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


@pytest.mark.parametrize("name", DECLARATIONS)
def test_mistakes_in_the_declaration(pool: RankPool, name: str) -> None:
    """Catches a declaration that is accepted and goes wrong later, or a message that does not say how to mend it."""
    options, expected = DECLARATIONS[name]
    assert pool.run(2, declaration, options) == [expected] * 2


def a_tensor_of_another_rank(handle: Any) -> None:
    made(handle)(numbers(2, 5, WIDTH))


def a_list_of_tensors(handle: Any) -> None:
    made(handle)([numbers(*INPUT)])


def an_argument_that_the_region_lacks(handle: Any) -> None:
    made(handle, argument="y")(numbers(*INPUT))


def an_argument_that_the_stage_lacks(handle: Any) -> None:
    made(handle, {**STAGES, "blocks.*.time": Stage("time", whole={"masks": "time"})})(numbers(*INPUT))


def an_argument_that_is_not_passed(handle: Any) -> None:
    made(handle, {**STAGES, "blocks.*.time": Stage("time", sharded={"mask": AXES})})(numbers(*INPUT))


def a_sharded_argument_that_is_no_tensor(handle: Any) -> None:
    model = made(handle, {**STAGES, "blocks.*.time": Stage("time", sharded={"mask": AXES})})
    model.blocks[0].time.mask = 3
    model(numbers(*INPUT))


def a_stage_before_the_region(handle: Any) -> None:
    made(handle).blocks[1].time(numbers(*INPUT))


def a_size_that_changes_within_the_region(handle: Any) -> None:
    model = made(handle, shard="time")
    model.between = lambda x: x[:, :, :-1]
    model(numbers(*INPUT))


def a_region_that_returns_a_dictionary(handle: Any) -> None:
    model = made(handle, region="blocks.0")
    model.blocks[0].forward = lambda x: {"x": x}
    model(numbers(*INPUT))


def with_mask(handle: Any, mask: Any) -> None:
    model = made(handle, {**STAGES, "blocks.*.time": Stage("time", whole={"mask": "time space"})})
    model.blocks[0].time.mask = mask
    model(numbers(*INPUT))


def a_mask_of_another_rank(handle: Any) -> None:
    with_mask(handle, torch.ones(7))


def a_mask_that_is_no_tensor(handle: Any) -> None:
    with_mask(handle, (torch.ones(7),))


def a_mask_that_is_a_shard(handle: Any) -> None:
    with_mask(handle, torch.ones(5, 3))


def returning(handle: Any, result: Callable[[Tensor], Any], **options: Any) -> None:
    model = made(handle, {**STAGES, "blocks.*.time": Stage("time", **options)})
    model.blocks[0].time.returned = result
    model(numbers(*INPUT))


def a_dictionary_as_result(handle: Any) -> None:
    returning(handle, lambda x: {"x": x})


def fewer_results_than_declared(handle: Any) -> None:
    returning(handle, lambda x: (x, x), returns={0: AXES, 2: AXES})


def a_result_of_another_size(handle: Any) -> None:
    returning(handle, lambda x: x.mean(1, keepdim=True))


CALLS: dict[Callable[[Any], None], str] = {
    a_tensor_of_another_rank: "argument 1 of region 'blocks' is a tensor of shape [2, 5, 4], but its layout 'batch time space "
    "channel' has 4 axes; give the layout of this tensor",
    a_list_of_tensors: "argument 1 of region 'blocks' is of type list, but its layout 'batch time space channel' has 4 axes; "
    "give the layout of this tensor",
    an_argument_that_the_region_lacks: "region 'blocks': its forward has no argument y, only x.",
    an_argument_that_the_stage_lacks: "stage blocks.0.time: its forward has no argument masks, only x, mask. "
    "Did you mean 'mask'?",
    an_argument_that_is_not_passed: "stage blocks.0.time was called without its sharded argument; name it in "
    "Stage(sharded=...)",
    a_sharded_argument_that_is_no_tensor: "argument mask of stage blocks.0.time is of type int, but its layout 'batch time "
    "space channel' has 4 axes; give the layout of this tensor",
    a_stage_before_the_region: "argument 1 of stage blocks.1.time came before the region 'blocks' was entered; name the region "
    "whose input must be split",
    a_size_that_changes_within_the_region: "argument 1 of stage blocks.1.time has the shape [2, 3, 6, 4], which is no shard of "
    "'batch time space channel' with time 5, space 7; if code outside a stage adds its result to its input, the stage "
    "needs residual='outside'",
    a_region_that_returns_a_dictionary: "region 'blocks.0' returned a dict, expected a tensor or a tuple; let it return one",
    a_mask_of_another_rank: "argument mask of stage blocks.0.time is a tensor of shape [7], but its layout 'time space' "
    "has 2 axes; give the layout of this tensor",
    a_mask_that_is_no_tensor: "argument mask of stage blocks.0.time is of type tuple, but its layout 'time space' has 2 "
    "axes; give the layout of this tensor",
    a_mask_that_is_a_shard: "argument mask of stage blocks.0.time has 3 positions along space, but the whole axis has 7; "
    "list arguments that every rank holds whole under `whole`",
    a_dictionary_as_result: "stage blocks.0.time returned a dict, expected a tensor or a tuple; let it return one",
    fewer_results_than_declared: "stage blocks.0.time returned 2 items, but item 2 should be sharded; items count from 0",
    a_result_of_another_size: "the result of stage blocks.0.time has the shape [2, 1, 4, 4], which is no shard of 'batch time "
    "space channel' with time 5, space 7; if code outside a stage adds its result to its input, the stage needs "
    "residual='outside'",
}


@pytest.mark.parametrize("mistake", CALLS)
def test_mistakes_in_a_call(pool: RankPool, mistake: Callable[[Any], None]) -> None:
    """Catches tensors that are divided or switched although they are not what was declared, and tracebacks in their place."""
    assert pool.run(2, message, mistake)[0] == CALLS[mistake]
