"""Where `parallelize` splits and gathers: the region, its axis, and models that call their modules in unusual ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.parallel import Stage, parallelize
from evodsp.parallel.stages import check_unlisted
from evodsp.parallel.testing import check
from tests.builders.axial import WIDTH, Attention, Built, Layer, built, equal, kinds, numbers, outcome
from tests.ranks import RankPool

AXES = "batch time space channel"
TIME, SPACE = 5, 7
STAGES = {"blocks.*.time": "time", "blocks.*.space": "space"}
INPUT = (2, TIME, SPACE, WIDTH)


class Model(nn.Module):
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


def two_layers() -> list[nn.Module]:
    return [Layer(time=Attention(1), space=Attention(2)) for _ in range(2)]


def of_a_list() -> Built:
    return built(Model(nn.ModuleList(two_layers())), INPUT)


def of_a_sequence() -> Built:
    return built(Model(nn.Sequential(*two_layers())), INPUT)


def of_a_dictionary() -> Built:
    first, second = two_layers()
    return built(Model(nn.ModuleDict({"second": second, "first": first})), INPUT)


def of_one_block() -> Built:
    return built(Model(nn.Sequential(two_layers()[0])), INPUT)


def in_blocks(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, STAGES, region="blocks")


@pytest.mark.parametrize("build", [of_a_list, of_a_sequence, of_a_dictionary, of_one_block])
def test_a_region_of_several_modules(pool: RankPool, build: Any) -> None:
    """Catches modules outside of the region that get shards (attention over time and space would see a part of them), and a
    container, which is never called itself, whose hooks never run."""
    check(*build(), in_blocks, (2, 3), run=pool.run)


def test_a_convolution_in_a_stage_of_a_region() -> None:
    """Catches a module that is refused although a stage holds it, because it is looked for by its path within the region."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"time": nn.Conv1d(2, 2, 3)})])})
    check_unlisted(model, "blocks", {"blocks.0.time": Stage("time")})
    with pytest.raises(UserError, match=r"^blocks\.0\.time is a Conv1d"):
        check_unlisted(model, "blocks", {"blocks.0.space": Stage("space")})


def bare() -> Built:
    return built(two_layers()[0], INPUT)


def everywhere(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {"time": "time", "space": "space"})


def test_the_region_may_be_the_model(pool: RankPool) -> None:
    """Catches an empty path that names no region."""
    check(*bare(), everywhere, (2, 3), run=pool.run)


class Encoder(nn.Module):
    """An encoder and a decoder, each a region, with a global module between them; the decoder runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = two_layers()
        self.between = Attention(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.encoder(x))
        return self.decoder(self.decoder(x)[:, :-1])


def of_two_regions() -> Built:
    return built(Encoder(), INPUT)


def in_two_regions(model: nn.Module, mesh: Any) -> None:
    for region in ("encoder", "decoder"):
        parallelize(model, mesh, AXES, {f"{region}.{axis}": axis for axis in ("time", "space")}, region=region)


def test_two_regions_and_one_that_runs_twice(pool: RankPool) -> None:
    """Catches a region that can be entered once only, or that keeps the sizes of its first input."""
    check(*of_two_regions(), in_two_regions, (2, 3), run=pool.run)


class TimeTwice(nn.Module):
    """Attention along time, again, and along space."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Attention(1), Attention(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(x)
        x = x + self.time(x)
        return x + self.space(x)


def of_many_samples() -> Built:
    return built(TimeTwice(), (3, TIME, SPACE, WIDTH))


def along_the_batch(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {"time": "time", "space": "space"}, shard="batch")


def along_time(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {"time": "time", "space": "space"}, shard="time")


def along_space(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {"time": "time", "space": "space"}, shard="space")


@pytest.mark.parametrize(("parallel", "switches"), [(along_the_batch, 0), (along_time, 4), (along_space, 2)])
def test_the_axis_to_start_with(pool: RankPool, parallel: Any, switches: int) -> None:
    """Catches `shard` that is ignored: along the batch no stage needs switches, along time two do, along space one."""
    check(*of_many_samples(), parallel, (2,), run=pool.run)
    assert pool.run(2, kinds, of_many_samples, parallel) == [["all-to-all"] * switches + ["all-gather"]] * 2


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


def of_two_lists() -> Built:
    return built(Alternating(), INPUT)


def alternately(model: nn.Module, mesh: Any) -> None:
    stages = {f"by_{axis}.*": Stage(axis, residual="inside") for axis in ("time", "space")}
    parallelize(model, mesh, AXES, stages, region=("by_time", "by_space"))


def test_a_region_of_two_lists(pool: RankPool) -> None:
    """Catches a region that ends with its first path, which would gather after each block, or misses the last module."""
    check(*of_two_lists(), alternately, (3,), run=pool.run)
    assert pool.run(3, kinds, of_two_lists, alternately) == [["all-to-all"] * 5 + ["all-gather"]] * 3


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


def of_equal_arguments() -> Built:
    return built(SelfAttention(), INPUT)


def all_three_sharded(model: nn.Module, mesh: Any) -> None:
    layouts = dict.fromkeys(("q", "k", "v"), AXES)
    stages = {axis: Stage(axis, sharded=layouts) for axis in ("time", "space")}
    parallelize(model, mesh, AXES, stages, shard="time")


def test_one_tensor_as_three_arguments(pool: RankPool) -> None:
    """Catches a tensor that is switched once for each argument that it is, and another argument taken for the same tensor."""
    check(*of_equal_arguments(), all_three_sharded, (2,), run=pool.run)
    # x and the update to time, the update back
    assert pool.run(2, kinds, of_equal_arguments, all_three_sharded) == [["all-to-all"] * 3 + ["all-gather"]] * 2


class Unruly(nn.Module):
    """Blocks, of which some are skipped, and one runs twice."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(two_layers() + two_layers()), order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def without_some() -> Built:
    return built(Unruly((0, 2, 2, 3)), INPUT)


def test_skipped_and_repeated_stages(pool: RankPool) -> None:
    """Catches states that are planned beforehand: a skipped or repeated stage would shift all that follow."""
    check(*without_some(), in_blocks, (2, 3), run=pool.run)


class Mixed(nn.Module):
    """A stage within a residual connection, before and after a block that leaves the tensor sharded along another axis."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Attention(2), Layer(attention=Attention(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.space(x)
        x = self.time(x)
        return x + self.space(x)


def of_mixed_stages() -> Built:
    return built(Mixed(), INPUT)


def partly_inside(model: nn.Module, mesh: Any) -> None:
    parallelize(model, mesh, AXES, {"space": "space", "time": Stage("time", residual="inside")}, shard="time")


def test_a_stage_whose_input_comes_on_different_axes(pool: RankPool) -> None:
    """Catches a result that returns to the axis of an earlier call's input."""
    check(*of_mixed_stages(), partly_inside, (2, 3), run=pool.run)


def skipping(handle: Any, order: tuple[int, ...]) -> str:
    """What the model answers that skips the first or last module of its region, after a pass that skipped none."""
    model, (x,) = built(Unruly((0, 1, 2, 3)), INPUT)
    in_blocks(model, handle)
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


def with_a_fragile_stage() -> Built:
    return built(Layer(time=Fragile(), space=Attention(2)), INPUT)


def after_a_failure(model: Any, mesh: Any) -> None:
    """A model whose stage failed in the pass before."""
    parallelize(model, mesh, AXES, {"time": "time", "space": "space"})
    model.time.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(numbers(*INPUT))
    model.time.fails = False


def test_a_pass_after_one_that_failed(pool: RankPool) -> None:
    """Catches what a failed call leaves behind: the next call's result would return to the failed call's state."""
    check(*with_a_fragile_stage(), after_a_failure, (2,), run=pool.run)


def of_copies(handle: Any) -> list[dict[str, Tensor]]:
    """Outcomes of a parallel model and of its copy, which has other parameters, one forward pass within the other's."""
    model, inputs = of_a_list()
    in_blocks(model, handle)
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
    model, inputs = of_a_list()
    expected = [outcome(model, inputs)]
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    expected.append(outcome(model, inputs))
    for copies in pool.run(2, of_copies):
        for found, wanted in zip(copies, expected, strict=True):
            equal(found, wanted, "of a copy")


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


def of_two_tensors() -> Built:
    return built(Evoformer(), (2, TIME, SPACE, WIDTH), (2, SPACE, SPACE, WIDTH))


def both_in_parallel(model: nn.Module, mesh: Any) -> None:
    msa, pair = "batch sequence residue channel", "batch i j channel"
    parallelize(model, mesh, msa, {"blocks.*.row": "residue", "blocks.*.column": "sequence"}, region="blocks")
    parallelize(
        model,
        mesh,
        pair,
        {
            "blocks.*.row": Stage("i j", sharded={"pair": pair}, returns={}),
            "blocks.*.starting": "j",
            "blocks.*.ending": "i",
        },
        region="blocks",
        argument="pair",
        result=1,
    )


def test_two_tensors_with_axes_of_their_own(pool: RankPool) -> None:
    """Catches a second call that replaces the first, or that splits and gathers the first call's tensor."""
    check(*of_two_tensors(), both_in_parallel, (2, 3), run=pool.run)
