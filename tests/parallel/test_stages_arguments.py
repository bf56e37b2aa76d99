"""What stages of `parallelize` receive and return: several tensors, keywords, tuples, and arguments that are whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from evodsp.parallel import Stage, parallelize
from evodsp.parallel.testing import check
from tests.builders.axial import WIDTH, Attention, Built, built
from tests.ranks import RankPool

AXES = "batch time space channel"
TIME, SPACE = 5, 7


class Pair(NamedTuple):
    """Two streams that share their axes."""

    first: Tensor
    note: str
    second: Tensor


class TwoStreams(nn.Module):
    """Attention along one dimension of two tensors, [B, T, S, C] and [C, B, S, T], each of which also sees the other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention, self.linear = Attention(dim), nn.Linear(WIDTH, WIDTH)

    def forward(self, scale: float, x: Tensor, y: Tensor) -> Pair:
        x = scale * self.attention(x)
        turned = y.permute(1, 3, 2, 0)
        y = (self.attention(turned) + self.linear(x)).permute(3, 0, 2, 1)
        return Pair(x, "second is turned", y)


class TwoStreamModel(nn.Module):
    """The streams start as the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = TwoStreams(1), TwoStreams(2)

    def forward(self, x: Tensor) -> Tensor:
        y = x.permute(3, 0, 2, 1)
        for stage in (self.time, self.space, self.time):
            update = stage(0.5, x, y=y)
            x, y = x + update.first, y + update.second
        return x + y.permute(1, 3, 2, 0)


def two_streams() -> Built:
    return built(TwoStreamModel(), (2, TIME, SPACE, WIDTH))


def both_sharded(model: nn.Module, mesh: Any) -> None:
    layouts = {"x": AXES, "y": "channel batch space time"}
    returns = {0: AXES, 2: "channel batch space time"}
    stages = {name: Stage(name, sharded=layouts, returns=returns) for name in ("time", "space")}
    parallelize(model, mesh, AXES, stages)


def test_several_sharded_arguments_and_results(pool: RankPool) -> None:
    """Catches a second tensor that stays behind when the first is switched, one that is switched along the first one's
    dimensions, and a NamedTuple that comes back as a plain tuple."""
    check(*two_streams(), both_sharded, (2, 3), run=pool.run)


class Keywords(nn.Module):
    """A stage whose tensor is its first parameter, but not the first keyword of the call."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> list[Tensor]:
        x = self.attention(x)
        return [x if gate is None else x * gate, torch.zeros(())]


class KeywordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"time": Keywords(1), "space": Keywords(2)})

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        x = x + self.block["time"](gate=gate, x=x).pop(0)
        x = x + self.block["space"](x=x).pop(0)
        return x + self.block["time"](gate=None, x=x).pop(0)


class Outer(nn.Module):
    """Calls the region by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.region = KeywordModel()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.region(x=x, gate=gate)


def called_by_keywords() -> Built:
    return built(Outer(), (2, TIME, SPACE, WIDTH), (TIME, 1, 1))


def with_a_gate(model: nn.Module, mesh: Any) -> None:
    stages = {f"region.block.{axis}": Stage(axis, whole={"gate": "time space channel"}) for axis in ("time", "space")}
    parallelize(model, mesh, AXES, stages, region="region", argument="x")


def test_calls_by_keyword(pool: RankPool) -> None:
    """Catches the first keyword of a call taken for the first parameter, an argument None that is divided, a list as result,
    and a region whose tensor is not its first parameter."""
    check(*called_by_keywords(), with_a_gate, (2, 3), run=pool.run)


class Positioned(nn.Module):
    """A stage that adds what depends on the position before it attends along a dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim)

    def forward(self, x: Tensor, place: Tensor, moment: Tensor, mask: Tensor) -> Tensor:
        return self.attention((x + place + moment) * mask)


class PositionedModel(nn.Module):
    """Learned tensors for each place [S, C] and moment [T, 1, C], and a mask [B, T, S, 1] or [B, 1, S, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.moment = nn.Parameter(torch.zeros(SPACE, WIDTH)), nn.Parameter(torch.zeros(TIME, 1, WIDTH))
        self.gate, self.time, self.space = nn.Linear(WIDTH, WIDTH), Positioned(1), Positioned(2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for stage in (self.time, self.space, self.time):
            x = x + stage(x, self.place, self.moment, mask=mask)
        return x


def mask_of_places() -> Built:
    return built(PositionedModel(), (2, TIME, SPACE, WIDTH), (2, 1, SPACE, 1))


def mask_of_all() -> Built:
    return built(PositionedModel(), (2, TIME, SPACE, WIDTH), (2, TIME, SPACE, 1))


def with_positions(model: nn.Module, mesh: Any) -> None:
    whole = {"place": "space channel", "moment": "time one channel", "mask": "batch time space one"}
    parallelize(model, mesh, AXES, {axis: Stage(axis, whole=whole) for axis in ("time", "space")})


@pytest.mark.parametrize("build", [mask_of_all, mask_of_places])
def test_whole_arguments_with_gradients(pool: RankPool, build: Any) -> None:
    """Catches a learned tensor whose gradient is only one shard's, a tensor divided along an axis that it lacks, and one of a
    single position, meant to be broadcast, divided so that all ranks but one get none of it."""
    check(*build(), with_positions, (2, 3), run=pool.run)


class PointwiseModel(nn.Module):
    """A stage that mixes nothing, but needs each position's own number."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.gate = Attention(1), Gate()

    def forward(self, x: Tensor) -> Tensor:
        number = torch.arange(TIME * SPACE, dtype=x.dtype).view(TIME, SPACE)
        x = x * self.gate(x, number).unsqueeze(-1)
        x = x + self.attend(x)
        return x * self.gate(x, number).unsqueeze(-1)


class Gate(nn.Module):
    """One number for each position, [B, T, S]: as it mixes nothing, it may return a tensor of any shape."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return x.sum(-1) * number.sin()


def numbered() -> Built:
    return built(PointwiseModel(), (2, TIME, SPACE, WIDTH))


def with_numbers(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {"attend": "time", "gate": Stage(whole={"number": "time space"})}, shard="space")


def test_a_stage_that_computes_along_no_axis(pool: RankPool) -> None:
    """Catches a stage listed for its whole arguments only whose result must have the input's layout."""
    check(*numbered(), with_numbers, (2, 3), run=pool.run)
