"""`parallelize`: models written for one device, whose submodules say along which axis they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.errors import UserError
from evodsp.parallel import Stage, average_gradients, dropout, parallelize
from evodsp.parallel.stages import check_unlisted
from evodsp.parallel.testing import check, dense
from evodsp.rng import Draws
from tests.builders.axial import WIDTH, Attention, Built, Layer, built, equal, kinds, numbers, outcome, total
from tests.builders.comparison import close
from tests.ranks import RankPool

AXES = "batch time space channel"
TIME, SPACE = 5, 7
INPUT, LONG = (2, TIME, SPACE, WIDTH), (2, 6, 4, WIDTH)
BOTH: dict[str, str | Stage] = {"time": "time", "space": "space"}
DIMS, SIZES = {"time": 1, "space": 2, "depth": 3}, {"time": TIME, "space": SPACE, "depth": 6}


class Masked(nn.Module):
    """Self-attention along one dimension, with a mask [T, S, ...] of keys."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.projections, self.out = dim, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.projections(x.movedim(self.dim, -2)).chunk(3, -1)
        if mask is not None:
            k = k + mask.movedim(self.dim - 1, -1).unsqueeze(-1)
        return self.out(F.scaled_dot_product_attention(q, k, v)).movedim(-2, self.dim)


class Block(nn.Module):
    """A transformer block with dropout, residual connections inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Masked(dim), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, draws: Draws) -> Tensor:
        x = x + dropout(self.attention(self.norm(x)), 0.3, positions, draws.at("attention"))
        return x + self.mlp(x).tanh()


class Attentions(nn.Module):
    """Attention modules with residual connections around them, and the same mask for all."""

    def __init__(self, axes: list[str]) -> None:
        super().__init__()
        for axis in axes:
            self.add_module(axis, Masked(DIMS[axis]))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for stage in self.children():
            x = x + stage(x, mask=mask)
        return x


class Transformer(nn.Module):
    """Two layers between an embedding and a head, which see whole tensors. Residual connections lie inside of stages, of which
    each is a layer, or outside. `reentrant`: how torch's checkpointing recomputes layers; None: not at all."""

    def __init__(self, axes: list[str], inside: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed, self.head, self.reentrant = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), reentrant
        blocks = [Block(DIMS[axis]) for axis in axes + axes] if inside else [Attentions(axes) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[1:-1]
        positions = torch.arange(shape.numel()).view(shape)
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            more = (positions, Draws.root(1).at(number)) if isinstance(layer, Block) else (positions.sin().double(),)
            again = self.reentrant is not None
            x = checkpoint(layer, x, *more, use_reentrant=self.reentrant) if again else layer(x, *more)
        return self.head(x)


TIME_SPACE = ["time", "space"]


def transformer(axes: list[str] = TIME_SPACE, inside: bool = True, reentrant: bool | None = None) -> Built:
    return built(Transformer(axes, inside, reentrant), (2, *(SIZES[axis] for axis in axes), WIDTH))


def in_parallel(model: nn.Module, mesh: Any, axes: list[str] = TIME_SPACE, inside: bool = True) -> None:
    """What a user writes."""
    layout = " ".join(axes)
    if inside:
        whole = {"positions": layout}
        stages = {f"layers.{n}": Stage(a, residual="inside", whole=whole) for n, a in enumerate(axes + axes)}
    else:
        stages = {f"layers.*.{axis}": Stage(axis, whole={"mask": layout}) for axis in axes}
    parallelize(model, mesh, f"batch {layout} channel", stages, region="layers")


SWITCHES = {(2, True): 3, (2, False): 4, (3, True): 2, (3, False): 4}
"""Fewest all-to-alls of two layers, by number of axes and whether residual connections lie inside. With two axes time,
space, time, space: one before each stage but the first; or there and back for two of four. With three axes a switch lasts for
two stages."""


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("axes", [TIME_SPACE, ["time", "space", "depth"]])
def test_a_parallel_model_computes_what_one_device_does(pool: RankPool, axes: list[str], inside: bool) -> None:
    """Catches a missing or superfluous switch, wrong gradients, shards of masks and positions of another axis, and states that
    are wrong when activations are recomputed."""
    parallel = partial(in_parallel, axes=axes, inside=inside)
    for ranks, reentrant in ((2, None), (3, False), (4, None)):
        check(*transformer(axes, inside, reentrant), parallel, (ranks,), run=pool.run)
        for found in pool.run(ranks, kinds, partial(transformer, axes, inside, reentrant), parallel):
            assert found.count("all-to-all") == SWITCHES[len(axes), inside]


def layers() -> nn.Sequential:
    """Two layers of attention along time and space."""
    return nn.Sequential(*(Layer(time=Attention(1), space=Attention(2)) for _ in range(2)))


class Framed(nn.Module):
    """Blocks between two modules that need whole tensors."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.before, self.blocks, self.after = Attention(1, 2), blocks, Attention(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if isinstance(self.blocks, nn.Sequential):
            return self.after(self.blocks(x))
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return self.after(x)


class Convolutions(nn.Module):
    """Convolutions along time and space of [C, T, S]: no batch, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0))
        self.space = nn.Conv2d(WIDTH, WIDTH, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(x).tanh()
        return x + self.space(x).tanh()


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


class Positioned(nn.Module):
    """A stage that adds what depends on the position before it attends along a dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim)

    def forward(self, x: Tensor, place: Tensor, moment: Tensor, mask: Tensor) -> Tensor:
        return self.attention((x + place + moment) * mask)


class PositionedModel(nn.Module):
    """Learned tensors for each place [S, C] and moment [T, 1, C], and a mask [B, 1, S, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.moment = nn.Parameter(torch.zeros(SPACE, WIDTH)), nn.Parameter(torch.zeros(TIME, 1, WIDTH))
        self.gate, self.time, self.space = nn.Linear(WIDTH, WIDTH), Positioned(1), Positioned(2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for stage in (self.time, self.space, self.time):
            x = x + stage(x, self.place, self.moment, mask=mask)
        return x


class Gate(nn.Module):
    """One number for each position, [B, T, S]: as it mixes nothing, it may return a tensor of any shape."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return x.sum(-1) * number.sin()


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


class Encoder(nn.Module):
    """An encoder and a decoder, each a region, with a global module between them; the decoder runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers()
        self.between = Attention(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.encoder(x))
        return self.decoder(self.decoder(x)[:, :-1])


def in_two_regions(model: nn.Module, mesh: Any) -> None:
    for region in ("encoder", "decoder"):
        parallelize(model, mesh, AXES, {f"{region}.{axis}": axis for axis in BOTH}, region=region)


class TimeTwice(nn.Module):
    """Attention along time, again, and along space."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Attention(1), Attention(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(x)
        x = x + self.time(x)
        return x + self.space(x)


class Alternating(nn.Module):
    """Two lists of modules, of which each is a residual block along its own axis; one of each runs in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Attention(1, 2), Attention(1, 2)
        self.by_time = nn.ModuleList(Layer(attention=Attention(1)) for _ in range(3))
        self.by_space = nn.ModuleList(Layer(attention=Attention(2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for along_time, along_space in zip(self.by_time, self.by_space, strict=True):
            x = along_space(along_time(x))
        return self.after(x)


class ThreeTimes(nn.Module):
    """Attention whose queries, keys and values are arguments of their own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q + 2 * k - v)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = ThreeTimes(2), ThreeTimes(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.space(x, x, x)
        return x + self.time(x, x, self.space(x, x, x))


class Unruly(nn.Module):
    """Blocks, of which some are skipped, and one runs twice."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList([*layers(), *layers()]), order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


class Mixed(nn.Module):
    """A stage within a residual connection, before and after a block that leaves the tensor sharded along another axis."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Attention(2), Layer(attention=Attention(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.space(x)
        x = self.time(x)
        return x + self.space(x)


class Fragile(nn.Module):
    """Attention along time that fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fails = Attention(1), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        if self.fails:
            raise RuntimeError("on purpose")
        return x


def after_a_failure(model: Any, mesh: Any) -> None:
    """A model whose stage failed in the pass before."""
    parallelize(model, mesh, AXES, BOTH)
    model.time.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(numbers(*INPUT))
    model.time.fails = False


class Biased(nn.Module):
    """Attention along residues of an MSA [B, S, R, C], biased by a pair representation [B, R, R, C], which is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.bias = Attention(2), nn.Linear(WIDTH, 1)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        weights = self.bias(pair).squeeze(-1).softmax(-1)
        return self.attention(msa) + torch.einsum("bij,bsjc->bsic", weights, msa)


class TwoTensors(nn.Module):
    """A block of two representations with different axes."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = Biased(), Attention(1)
        self.starting, self.ending = Attention(2), Attention(1)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = msa + self.row(msa, pair)
        msa = msa + self.column(msa)
        pair = pair + self.starting(pair)
        return msa, pair + self.ending(pair)


class Evoformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoTensors() for _ in range(2))

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            msa, pair = block(msa, pair)
        return msa, pair


def both_in_parallel(model: nn.Module, mesh: Any) -> None:
    msa, pair = "batch sequence residue channel", "batch i j channel"
    of_msa = {"blocks.*.row": "residue", "blocks.*.column": "sequence"}
    parallelize(model, mesh, msa, of_msa, region="blocks")
    row = Stage("i j", sharded={"pair": pair}, returns={})
    of_pair: dict[str, str | Stage] = {"blocks.*.row": row, "blocks.*.starting": "j", "blocks.*.ending": "i"}
    parallelize(model, mesh, pair, of_pair, region="blocks", argument="pair", result=1)


def around_a_copy(model: nn.Module, mesh: Any) -> None:
    """A model whose copy (an average of weights, for instance) sees another size before the backward pass."""
    in_parallel(model, mesh)
    twin = copy.deepcopy(model)
    model.register_forward_hook(lambda *_: (twin(numbers(*LONG)), None)[1])


class Recycling(nn.Module):
    """The region runs three times in one pass, each time on a longer input; the result of the first time is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(TIME_SPACE, reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.model(x[:, :3])
        second = self.model(torch.cat([first, x[:, 3:4]], 1))
        return self.model(torch.cat([second, first], 1))


def of_the_inner_model(model: nn.Module, mesh: Any) -> None:
    in_parallel(model.model, mesh)


@dataclass(frozen=True)
class Toy:
    """A model, the shapes of its inputs, and how it is made parallel."""

    model: Callable[[], nn.Module]
    parallel: Callable[[nn.Module, Any], Any]
    shapes: tuple[tuple[int, ...], ...] = (INPUT,)
    ranks: tuple[int, ...] = (2, 3)
    kinds: tuple[str, ...] = ()
    """The collectives of its forward pass; (): not compared."""

    def built(self) -> Built:
        return built(self.model(), *self.shapes)


def along(stages: Mapping[str, str | Stage], layout: str = AXES, **options: Any) -> Callable[..., Any]:
    return partial(parallelize, layout=layout, stages=stages, **options)


IN_LAYERS = along({"*.time": "time", "*.space": "space"})
IN_BLOCKS = along({"blocks.*.time": "time", "blocks.*.space": "space"}, region="blocks")
THREE = dict.fromkeys(("q", "k", "v"), AXES)
TURNED = "channel batch space time"
ALL = {"place": "space channel", "moment": "time one channel", "mask": "batch time space one"}
SWITCH, GATHER = "all-to-all", "all-gather"
TOYS: dict[str, Toy] = {
    # An axis of one position that is divided: ranks without any would divide by zero in a mean, and states of equal shapes
    # would be confused. Empty shards that break a collective or a gradient.
    **{
        f"{time} moments, {space} places": Toy(layers, IN_LAYERS, ((2, time, space, WIDTH),), (3, 4))
        for time, space in ((1, 7), (5, 1), (1, 1), (2, 3), (2, 2))
    },
    # Dimensions that are counted as if there were four, and a stage along two axes that is given one of them whole.
    "six axes": Toy(
        lambda: nn.Sequential(Layer(time=Attention(4), row=Attention(3), planes=Attention(1, 2))),
        along({"0.time": "time", "0.row": "row", "0.planes": "plane depth"}, "batch plane depth row time channel"),
        ((2, 3, 2, 5, 4, WIDTH),),
    ),
    # An order of axes that is taken for granted: a batch in front, channels at the end.
    "channels first, no batch": Toy(
        lambda: nn.Sequential(Convolutions(), Convolutions()),
        along({"*.time": "time", "*.space": "space"}, "channel time space"),
        ((WIDTH, TIME, SPACE),),
    ),
    # A missing line of the paper's table 2: from a shard to the whole tensor, and back to a shard.
    "a stage along all axes": Toy(
        lambda: nn.Sequential(
            *(Layer(time=Attention(1), everything=Attention(1, 2), space=Attention(2)) for _ in range(2))
        ),
        along({"*.time": "time", "*.space": "space", "*.everything": "time space"}),
    ),
    # Communication beyond the paper's table 2: a split costs nothing, a result that stays whole is not gathered. One gather for
    # the second block; the third splits along time; a switch to space before the fourth; and the gather at the end.
    "blocks along all axes": Toy(
        lambda: nn.Sequential(*(Layer(attention=Attention(*dims)) for dims in ((1,), (1, 2), (2,), (1,)))),
        along(
            {str(n): Stage(axes, residual="inside") for n, axes in enumerate(["time", "time space", "space", "time"])}
        ),
        kinds=(GATHER, SWITCH, GATHER),
    ),
    # A second tensor that stays behind when the first is switched, one that is switched along the first one's dimensions, and a
    # NamedTuple that comes back as a plain tuple.
    "several sharded arguments and results": Toy(
        TwoStreamModel,
        along({a: Stage(a, sharded={"x": AXES, "y": TURNED}, returns={0: AXES, 2: TURNED}) for a in BOTH}),
    ),
    # The first keyword of a call taken for the first parameter, an argument None that is divided, a list as result, and a
    # region whose tensor is not its first parameter.
    "calls by keyword": Toy(
        Outer,
        along(
            {f"region.block.{axis}": Stage(axis, whole={"gate": "time space channel"}) for axis in BOTH},
            region="region",
            argument="x",
        ),
        (INPUT, (TIME, 1, 1)),
    ),
    # A learned tensor whose gradient is only one shard's, a tensor divided along an axis that it lacks, and one of a single
    # position, meant to be broadcast, divided so that all ranks but one get none of it.
    "whole arguments with gradients": Toy(
        PositionedModel, along({axis: Stage(axis, whole=ALL) for axis in BOTH}), (INPUT, (2, 1, SPACE, 1))
    ),
    # A stage listed for its whole arguments only whose result must have the input's layout.
    "a stage that computes along no axis": Toy(
        PointwiseModel, along({"attend": "time", "gate": Stage(whole={"number": "time space"})}, shard="space")
    ),
    # Modules outside of the region that get shards (attention over time and space would see a part of them), and a container,
    # which is never called itself, whose hooks never run.
    "a region that is a list": Toy(lambda: Framed(nn.ModuleList(layers())), IN_BLOCKS),
    "a region that is a sequence": Toy(lambda: Framed(layers()), IN_BLOCKS),
    "a region that is a dictionary": Toy(
        lambda: Framed(nn.ModuleDict(dict(zip(("second", "first"), layers(), strict=True)))), IN_BLOCKS
    ),
    "a region of one block": Toy(lambda: Framed(layers()[:1]), IN_BLOCKS),
    # A region that can be entered once only, or that keeps the sizes of its first input.
    "two regions, of which one runs twice": Toy(Encoder, in_two_regions),
    # `shard` that is ignored: along the batch no stage needs switches, along time two do, along space one.
    **{
        f"along {axis} first": Toy(
            TimeTwice, along(BOTH, shard=axis), ((3, TIME, SPACE, WIDTH),), (2,), (*[SWITCH] * switches, GATHER)
        )
        for axis, switches in (("batch", 0), ("time", 4), ("space", 2))
    },
    # A region that ends with its first path, which would gather after each block, or misses the last module.
    "a region of two lists": Toy(
        Alternating,
        along({f"by_{a}.*": Stage(a, residual="inside") for a in BOTH}, region=("by_time", "by_space")),
        ranks=(3,),
        kinds=(*[SWITCH] * 5, GATHER),
    ),
    # A tensor that is switched once for each argument that it is, and another argument taken for the same tensor. Switches:
    # x and the update to time, the update back.
    "one tensor as three arguments": Toy(
        SelfAttention,
        along({axis: Stage(axis, sharded=THREE) for axis in BOTH}, shard="time"),
        ranks=(2,),
        kinds=(*[SWITCH] * 3, GATHER),
    ),
    # States that are planned beforehand: a skipped or repeated stage would shift all that follow.
    "skipped and repeated stages": Toy(lambda: Unruly((0, 2, 2, 3)), IN_BLOCKS),
    # A result that returns to the axis of an earlier call's input.
    "a stage whose input comes on different axes": Toy(
        Mixed, along({"space": "space", "time": Stage("time", residual="inside")}, shard="time")
    ),
    # What a failed call leaves behind: the next call's result would return to the failed call's state.
    "a pass after one that failed": Toy(
        lambda: Layer(time=Fragile(), space=Attention(2)), after_a_failure, ranks=(2,)
    ),
    # A second call that replaces the first, or that splits and gathers the first call's tensor.
    "two tensors with axes of their own": Toy(Evoformer, both_in_parallel, (INPUT, (2, SPACE, SPACE, WIDTH))),
    # A copy of a model that shares the original's record of sizes, which runs before the backward pass; hooks that misbehave
    # when torch calls the stages again: a split of what was split, another dropout mask.
    "a copy in a recomputed model": Toy(
        lambda: Transformer(TIME_SPACE, reentrant=True), around_a_copy, ranks=(2, 3)
    ),
    # One record of sizes for all calls of a region: the recomputation of the first call would take the last one's.
    "a region that runs on its own results": Toy(Recycling, of_the_inner_model),
}  # fmt: skip


def kinds_of(handle: Any, name: str) -> list[str]:
    return kinds(handle, TOYS[name].built, TOYS[name].parallel)


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_computes_what_one_device_does(pool: RankPool, name: str) -> None:
    """Catches what the table says above each model."""
    toy = TOYS[name]
    check(*toy.built(), toy.parallel, toy.ranks, run=pool.run)
    if toy.kinds:
        ranks = toy.ranks[0]
        assert pool.run(ranks, kinds_of, name) == [list(toy.kinds)] * ranks


def test_a_convolution_in_a_stage_of_a_region() -> None:
    """Catches a module that is refused although a stage holds it, because it is looked for by its path within the region."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"time": nn.Conv1d(2, 2, 3)})])})
    check_unlisted(model, "blocks", {"blocks.0.time": Stage("time")})
    with pytest.raises(UserError, match=r"^blocks\.0\.time is a Conv1d"):
        check_unlisted(model, "blocks", {"blocks.0.space": Stage("space")})


def memory_of_shards(handle: Any) -> list[tuple[int, int]]:
    """Numbers that each stage's input has, and that its memory holds."""
    (model, inputs), found = built(layers(), INPUT), []
    IN_LAYERS(model, handle)
    for layer in model:
        for stage in (layer.time, layer.space):
            hook = lambda _, args: found.append((args[0].numel(), args[0].untyped_storage().size() // 8))  # noqa: E731
            stage.register_forward_pre_hook(hook)
    model(*inputs)
    return found


def test_a_shard_does_not_keep_the_whole_tensor_in_memory(pool: RankPool) -> None:
    """Catches a shard that is a view: what autograd saves of it would keep the whole input of the region on every rank."""
    for found in pool.run(2, memory_of_shards):
        assert len(found) == 4
        assert all(own == held for own, held in found)


def with_an_empty_axis(handle: Any) -> Tensor:
    """The parallel model's output for an empty time axis."""
    model, (x,) = built(layers(), (2, 0, 3, WIDTH))
    IN_LAYERS(model, handle)
    with torch.no_grad():
        return model(x)


def test_an_axis_without_positions(pool: RankPool) -> None:
    """Catches a division of an empty axis: batches that a loader left empty must pass, as they do on one device."""
    for found in pool.run(2, with_an_empty_axis):
        assert found.shape == (2, 0, 3, WIDTH)


def skipping(handle: Any, order: tuple[int, ...]) -> str:
    """What the model answers that skips the first or last module of its region, after a pass that skipped none."""
    model, (x,) = built(Unruly((0, 1, 2, 3)), INPUT)
    IN_BLOCKS(model, handle)
    model(x)
    model.order = order
    with pytest.raises(UserError) as error:
        model(x)
    model.order = (0, 1, 2, 3)
    model(x)
    return str(error.value)


def test_a_region_whose_ends_are_skipped(pool: RankPool) -> None:
    """Catches a shard that a model returns as if it were the result, because the module at whose exit it is gathered was left
    out (stochastic depth, early exits)."""
    for message in pool.run(2, skipping, (0, 1, 2)):
        assert message.startswith("the region 'blocks' was entered but not left")
    for message in pool.run(2, skipping, (1, 2, 3)):
        assert "came before the region 'blocks' was entered" in message


def of_copies(handle: Any) -> list[dict[str, Tensor]]:
    """Outcomes of a model and of its copy, which has other parameters, one pass within the other's. None: one device."""
    model, inputs = TOYS["a region that is a list"].built()
    if handle is not None:
        IN_BLOCKS(model, handle)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    y = model(*inputs)
    found = outcome(twin, inputs, handle)
    y.sum().backward()
    model.zero_grad()
    return [outcome(model, inputs, handle), found]


def test_a_copy_of_a_parallel_model(pool: RankPool) -> None:
    """Catches hooks of a copy that call the original's modules, and process groups, which cannot be copied."""
    expected = of_copies(None)
    for copies in pool.run(2, of_copies):
        for found, wanted in zip(copies, expected, strict=True):
            equal(found, wanted, "of a copy")


def without_gradients(handle: Any, mode: Any) -> tuple[Tensor, bool]:
    """The output of a model in evaluation, and whether it has a graph."""
    model, inputs = transformer(reentrant=False)
    in_parallel(model, handle)
    with mode():
        y = model.eval()(*inputs)
    return y.clone(), y.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients(pool: RankPool, mode: Any) -> None:
    """Catches hooks that need a graph."""
    expected = outcome(*transformer())["output 0"]
    for found, has_graph in pool.run(2, without_gradients, mode):
        close(found, expected, "output")
        assert not has_graph


def of_both(model: nn.Module, order: str, handle: Any = None) -> dict[str, Tensor]:
    """Gradients of two inputs of different sizes: each forward pass before both backward passes, in several orders."""
    inputs = [numbers(*shape).requires_grad_() for shape in (INPUT, LONG)]
    losses = [total([model(x)]) for x in inputs]
    with torch.no_grad():
        model(numbers(2, 3, 3, WIDTH))  # a validation batch in between
    if order == "together":
        (losses[0] + losses[1]).backward()
    for loss in {"together": [], "same": losses, "reversed": losses[::-1]}[order]:
        loss.backward()
    if handle is not None:
        average_gradients([*inputs, *model.parameters()], handle)
    found = {f"input {n}": x.grad for n, x in enumerate(inputs)} | {
        name: p.grad for name, p in model.named_parameters()
    }
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def in_one_go(handle: Any, reentrant: bool | None) -> list[dict[str, Tensor]]:
    found = []
    for order in ("together", "same", "reversed"):
        model, _ = transformer(reentrant=reentrant)
        in_parallel(model, handle)
        found.append(of_both(model, order, handle))
    return found


@pytest.mark.parametrize("reentrant", [None, False])
def test_backward_passes_of_two_inputs_with_different_sizes(pool: RankPool, reentrant: bool | None) -> None:
    """Catches a recomputation that takes the sizes of the latest forward pass for its own: a shard of six moments looks like
    all of three."""
    expected = of_both(transformer()[0], "same")
    for orders in pool.run(2, in_one_go, reentrant):
        for found in orders:
            equal(found, expected, "of two inputs")


def reentrant_after_another_size(handle: Any) -> str:
    """What a reentrant recomputation answers after a forward pass with another size."""
    model, inputs = transformer(reentrant=True)
    in_parallel(model, handle)
    y = model(*inputs)
    model(numbers(*LONG))
    with pytest.raises(UserError) as error:
        y.sum().backward()
    return str(error.value)


def test_reentrant_recomputation_after_another_size(pool: RankPool) -> None:
    """Catches gradients of wrong states: torch tells nobody to which forward pass a reentrant recomputation belongs."""
    for message in pool.run(2, reentrant_after_another_size):
        assert "which is no shard of 'batch time space channel' with time 6, space 4" in message


class Energies(nn.Module):
    """Blocks that are recomputed, and the sum of squares at each position as a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Block(1), Block(2)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        for block in (self.time, self.space):
            x = checkpoint(block, x, positions, Draws.root(0), use_reentrant=False)
        return x, x.square().sum(-1)


def of_energies(handle: Any) -> dict[str, Tensor]:
    """Gradients of the total energy of two inputs, of which each rank adds up its positions. None: one device."""
    model, ranks = dense(Energies()), 1
    if handle is not None:
        stages = {axis: Stage(axis, residual="inside", whole={"positions": "time space"}) for axis in BOTH}
        parallelize(model, handle, AXES, stages)
        ranks = torch.distributed.get_world_size(handle)
    losses = []
    for shape in (INPUT, LONG):
        positions = torch.arange(shape[1] * shape[2]).view(shape[1:3])
        losses.append(ranks * model(numbers(*shape).requires_grad_(), positions)[1].sum())
    for loss in losses:
        loss.backward()
    if handle is not None:
        average_gradients(model.parameters(), handle)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_only_another_result_of_the_region_is_used(pool: RankPool) -> None:
    """Catches a recomputation that knows its forward pass only if the gathered result got a gradient. The loss is a sum over
    shards, so each rank's counts as many times as there are ranks."""
    expected = of_energies(None)
    for found in pool.run(2, of_energies):
        equal(found, expected, "of energies")
