"""Passes of `parallelize`: without gradients, with recomputed activations, several forward passes before the backward ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evodsp.errors import UserError
from evodsp.parallel import Stage, average_gradients, dropout, parallelize
from evodsp.parallel.testing import check, dense
from evodsp.rng import Draws
from tests.builders.axial import WIDTH, Attention, Built, built, equal, numbers, outcome, total
from tests.builders.comparison import close
from tests.ranks import RankPool

AXES = "batch time space channel"
SHORT, LONG = (2, 5, 7, WIDTH), (2, 6, 4, WIDTH)
DROPOUT = 0.3


class Block(nn.Module):
    """Attention along one dimension with its residual connection inside, and dropout."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(dim), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, positions: Tensor, draws: Draws) -> Tensor:
        return x + dropout(self.attention(self.norm(x)), DROPOUT, positions, draws)


class Model(nn.Module):
    """Blocks along time and space in turn. `reentrant`: how torch's checkpointing recomputes them; None: not at all."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant, self.embed = reentrant, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(1 + n % 2) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1] * x.shape[2]).view(x.shape[1:3])
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            arguments = (x, positions, Draws.root(0).at(number))
            x = (
                block(*arguments)
                if self.reentrant is None
                else checkpoint(block, *arguments, use_reentrant=self.reentrant)
            )
        return x


def kept() -> Built:
    return built(Model(), SHORT)


def recomputed() -> Built:
    return built(Model(reentrant=False), SHORT)


def recomputed_reentrantly() -> Built:
    return built(Model(reentrant=True), SHORT)


def in_parallel(model: nn.Module, mesh: Any) -> None:
    whole = {"positions": "time space"}
    stages = {f"blocks.{n}": Stage(("time", "space")[n % 2], residual="inside", whole=whole) for n in range(4)}
    parallelize(model, mesh, AXES, stages, region="blocks")


@pytest.mark.parametrize("build", [kept, recomputed, recomputed_reentrantly])
def test_recomputed_activations(pool: RankPool, build: Any) -> None:
    """Catches hooks that misbehave when torch calls the stages again: a recomputed result in another state than the first
    one, a split of what was split, another dropout mask."""
    check(*build(), in_parallel, (2, 3), run=pool.run)


def without_gradients(handle: Any, mode: Any) -> tuple[Tensor, bool]:
    """The output of a model in evaluation, and whether it has a graph."""
    model, inputs = recomputed()
    in_parallel(model, handle)
    with mode():
        y = model.eval()(*inputs)
    return y.clone(), y.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients(pool: RankPool, mode: Any) -> None:
    """Catches hooks that need a graph."""
    expected = outcome(*kept())["output 0"]
    for found, has_graph in pool.run(2, without_gradients, mode):
        close(found, expected, "output")
        assert not has_graph


def of_both(model: nn.Module, order: str, handle: Any = None) -> dict[str, Tensor]:
    """Gradients of two inputs of different sizes: each forward pass before both backward passes, in several orders."""
    inputs = [numbers(*shape).requires_grad_() for shape in (SHORT, LONG)]
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


def in_one_go(handle: Any, build: Any) -> list[dict[str, Tensor]]:
    found = []
    for order in ("together", "same", "reversed"):
        model, _ = build()
        in_parallel(model, handle)
        found.append(of_both(model, order, handle))
    return found


@pytest.mark.parametrize("build", [kept, recomputed])
def test_backward_passes_of_two_inputs_with_different_sizes(pool: RankPool, build: Any) -> None:
    """Catches a recomputation that takes the sizes of the latest forward pass for its own: a shard of six moments looks like
    all of three."""
    expected = of_both(kept()[0], "same")
    for orders in pool.run(2, in_one_go, build):
        for found in orders:
            equal(found, expected, "of two inputs")


def reentrant_after_another_size(handle: Any) -> str:
    """What a reentrant recomputation answers after a forward pass with another size."""
    model, inputs = recomputed_reentrantly()
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


def around_a_copy(model: nn.Module, mesh: Any) -> None:
    """A model whose copy (an average of weights, for instance) sees another size before the backward pass."""
    in_parallel(model, mesh)
    twin = copy.deepcopy(model)

    def other_size(*_: Any) -> None:
        twin(numbers(*LONG))

    model.register_forward_hook(other_size)


def test_a_copy_runs_before_the_backward_pass(pool: RankPool) -> None:
    """Catches a copy of a model that shares the original's record of sizes."""
    check(*recomputed_reentrantly(), around_a_copy, (2,), run=pool.run)


class Recycling(nn.Module):
    """The region runs three times in one pass, each time on a longer input; the result of the first time is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.model(x[:, :3])
        second = self.model(torch.cat([first, x[:, 3:4]], 1))
        return self.model(torch.cat([second, first], 1))


def recycling() -> Built:
    return built(Recycling(), SHORT)


def of_the_inner_model(model: nn.Module, mesh: Any) -> None:
    in_parallel(model.model, mesh)


def test_a_region_that_runs_on_its_own_results(pool: RankPool) -> None:
    """Catches one record of sizes for all calls of a region: the recomputation of the first call would take the last one's."""
    check(*recycling(), of_the_inner_model, (2, 3), run=pool.run)


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
        stages = {axis: Stage(axis, residual="inside", whole={"positions": "time space"}) for axis in ("time", "space")}
        parallelize(model, handle, AXES, stages)
        ranks = torch.distributed.get_world_size(handle)
    losses = []
    for shape in (SHORT, LONG):
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
