"""Section 3.4 of the paper: modules of other kinds, written for one device, are made parallel without a change.

Each module mixes positions along time in one block and along space in another, among blocks of plain attention along the other
axis. Dropout is on. Sizes differ and do not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from evodsp.parallel import Group, Ledger, Stage, average_gradients, parallelize
from evodsp.parallel.testing import dense
from scripts.paper.adaptability import attention
from scripts.paper.adaptability.attention import Attention, CrossAttention
from scripts.paper.adaptability.recurrence import DepthwiseConvolution, SelectiveScan, TimeMixing
from scripts.paper.adaptability.video import VideoTransformer
from tests.builders.comparison import close
from tests.ranks import RankPool

pytestmark = pytest.mark.verify

AXES, DIMS = "batch time space channel", {"time": 1, "space": 2}
WIDTH, HEADS, CHANNELS, CONTEXT = 4, 4, 3, 6
SIZES, SMALL = (2, 5, 7, CHANNELS), (1, 2, 3, CHANNELS)

MIXERS: dict[str, Callable[[int], nn.Module]] = {
    "attention": lambda dim: Attention(WIDTH, HEADS, dim),
    "multi-query attention": lambda dim: Attention(WIDTH, HEADS, dim, key_heads=1),
    "grouped-query attention": lambda dim: Attention(WIDTH, HEADS, dim, key_heads=2),
    "torch's flash kernel": lambda dim: Attention(WIDTH, HEADS, dim, kernel=attention.fused),
    "flash-attn": lambda dim: Attention(WIDTH, HEADS, dim, key_heads=2, kernel=attention.flash),
    "cross attention": lambda dim: CrossAttention(WIDTH, HEADS, dim),
    "cross attention by moment": lambda dim: CrossAttention(WIDTH, HEADS, dim),
    "selective scan": lambda dim: SelectiveScan(WIDTH, 2, dim),
    "linear recurrence": lambda dim: TimeMixing(WIDTH, dim),
    "depthwise convolution": lambda dim: DepthwiseConvolution(WIDTH, 3, dim),
}


def built(name: str, sizes: tuple[int, ...]) -> tuple[VideoTransformer, tuple[Tensor, ...]]:
    """A model with this kind of module, random parameters, and its inputs."""
    mixers = {
        # Positions along time have no context in common if each moment has its own.
        "first_time": MIXERS[name](2 if name == "cross attention by moment" else 1),
        "first_space": MIXERS["attention"](2),
        "last_time": MIXERS["attention"](1),
        "last_space": MIXERS[name](2),
    }
    model = VideoTransformer(CHANNELS, WIDTH, mixers, rate=0.2)
    generator = torch.Generator().manual_seed(0)
    shapes = [sizes]
    if name.startswith("cross"):
        shapes.append((sizes[0], *sizes[1:2] * name.endswith("moment"), CONTEXT, WIDTH))
    dense(model)
    return model, tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


def in_parallel(name: str, model: VideoTransformer, mesh: Any) -> None:
    """What a user writes. Cross attention mixes no positions of the video: its blocks run on shards along any axis."""
    stages: dict[str, Stage] = {}
    for block, module in model.blocks.named_children():
        crossing = isinstance(module.mixer, CrossAttention)
        whole = {"positions": "time space"} | (
            {"context": "batch time length channel"} if name.endswith("moment") else {}
        )
        stages[f"blocks.{block}"] = Stage("" if crossing else block.split("_")[1], residual="inside", whole=whole)
    parallelize(model, mesh, AXES, stages, region="blocks")


def outcome(model: nn.Module, inputs: tuple[Tensor, ...], handle: Any = None) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs and parameters; with `handle`, their means over its ranks."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    y = model(*inputs)
    (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
    if handle is not None:
        average_gradients([*inputs, *model.parameters()], handle)
    gradients = {f"input {n}": x.grad for n, x in enumerate(inputs)} | {n: p.grad for n, p in model.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient: {missing}"
    return {"output": y.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def on_ranks(handle: Any, name: str) -> dict[str, Tensor]:
    model, inputs = built(name, SIZES)
    in_parallel(name, model, handle)
    return outcome(model, inputs, handle)


def compare(pool: RankPool, name: str, ranks: int) -> None:
    expected = outcome(*built(name, SIZES))
    for found in pool.run(ranks, on_ranks, name):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            close(found[key], value, f"{key} on {ranks} ranks")


@pytest.mark.parametrize("name", MIXERS)
def test_a_module_in_parallel_equals_one_device(pool: RankPool, name: str) -> None:
    """Catches a module that sees a part of its axis: recurrences and convolutions would begin anew with each shard, attention
    would miss keys. Catches a context that is divided, or not divided, against its layout, and its gradient."""
    for ranks in (2, 3):
        compare(pool, name, ranks)


@pytest.mark.parametrize("name", MIXERS)
def test_a_module_in_parallel_equals_one_device_on_four_ranks(pool: RankPool, name: str) -> None:
    """Catches the same bugs as the test above, with shards of one and two positions."""
    compare(pool, name, 4)


class Shared(torch.autograd.Function):
    """A tensor that every rank holds, as an input of one program run by all ranks, whose loss is the mean of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.handle)
        return gradient / torch.distributed.get_world_size(ctx.handle), None


def check_gradients(handle: Any, name: str, fast: bool) -> bool:
    """gradcheck of the parallel model, in its inputs and the parameters of one module of this kind."""
    model, inputs = built(name, SMALL)
    in_parallel(name, model, handle)
    names = [key for key, _ in model.named_parameters() if key.startswith("blocks.last_space.mixer.")]

    def program(*tensors: Tensor) -> Tensor:
        shared = [Shared.apply(x, handle) for x in tensors]
        parameters = dict(zip(names, shared[len(inputs) :], strict=True))
        return functional_call(model, parameters, tuple(shared[: len(inputs)]))

    parameters = [dict(model.named_parameters())[key].detach() for key in names]
    tensors = tuple(x.clone().requires_grad_() for x in (*inputs, *parameters))
    return torch.autograd.gradcheck(program, tensors, check_undefined_grad=False, nondet_tol=0.0, fast_mode=fast)


@pytest.mark.parametrize("name", MIXERS)
def test_gradcheck_of_a_parallel_module(pool: RankPool, name: str) -> None:
    """Catches a wrong gradient that parallel runs and one device share. On three ranks, one has no position along time."""
    assert all(pool.run(3, check_gradients, name, True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MIXERS)
def test_gradcheck_of_a_parallel_module_in_every_entry(pool: RankPool, name: str, ranks: int) -> None:
    """Catches the same bugs as the test above, with the whole Jacobian instead of random directions."""
    assert all(pool.run(ranks, check_gradients, name, False))


def kinds(handle: Any, name: str) -> list[str]:
    """The collectives of the forward pass, in order."""
    model, inputs = built(name, SIZES)
    ledger = Ledger()
    in_parallel(name, model, Group(handle, ledger))
    model(*inputs)
    return [entry.kind for entry in ledger.of("forward")]


@pytest.mark.parametrize(("name", "switches"), [("selective scan", 3), ("cross attention", 1)])
def test_what_a_module_costs(pool: RankPool, name: str, switches: int) -> None:
    """Catches communication that depends on what a module computes: blocks along time, space, time, space need three
    switches. If the first and the last are cross attention, which runs on any shard, one is left."""
    for found in pool.run(2, kinds, name):
        assert found == ["all-to-all"] * switches + ["all-gather"]
