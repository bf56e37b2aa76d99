"""Collectives within a graph of torch.compile do what they do outside of one, in both passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from evodsp.parallel.collectives import Broadcast, Collective, Gather, Reduce, ScatterSum, Sum, Switch, shard_sizes
from evodsp.parallel.exchange import start
from evodsp.parallel.group import Group
from tests.ranks import UncheckedPool

ROWS, COLUMNS = 5, 7


@pytest.fixture(scope="module")
def unchecked() -> Iterator[UncheckedPool]:
    ranks = UncheckedPool(3)
    yield ranks
    ranks.stop()


def computed(group: Group, every: list[Collective], compiled_with: Any) -> list[tuple[Tensor, Tensor]]:
    """The result and the gradient of each collective, with something else computed while its numbers travel, in one graph."""

    def step(inputs: list[Tensor]) -> list[Tensor]:
        results = []
        for x, collective in zip(inputs, every, strict=True):
            pending = start(x.sin(), collective)
            other = (x * x).sum()
            results.append(pending.wait().cos() + other)
        return results

    generator = torch.Generator().manual_seed(group.rank)
    rows = shard_sizes(ROWS, group.size)[group.rank]
    inputs = []
    for collective in every:
        whole = isinstance(collective, ScatterSum | Sum | Reduce)
        columns = shard_sizes(COLUMNS, group.size)[0] if isinstance(collective, Reduce) else COLUMNS
        shape = (2, ROWS if whole else rows, columns, 3)
        inputs.append(torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_())
    function = torch.compile(step, fullgraph=True, dynamic=False, backend=compiled_with) if compiled_with else step
    results = function(inputs)
    loss = torch.stack([(y * torch.arange(y.numel()).view(y.shape)).sum() for y in results]).sum()
    return [*zip([y.detach() for y in results], torch.autograd.grad(loss, inputs), strict=True)]


def compare(handle: Any) -> None:
    """Raises if a compiled collective differs from the same one uncompiled."""
    group = Group(handle)
    rows, columns = shard_sizes(ROWS, group.size), shard_sizes(COLUMNS, group.size)
    every: list[Collective] = [
        Switch(group, 1, 2, rows, columns),
        Gather(group, 1, rows),
        ScatterSum(group, 1, rows),
        Sum(group),
        Broadcast(group, 0, 1, rows),
        Reduce(group, 0, 2, columns),
    ]
    both = (computed(group, every, backend) for backend in ("aot_eager", None))
    for collective, found, expected in zip(every, *both, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=str(collective))
    torch.compiler.reset()


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_compiled_collective_is_the_same_map_and_transpose(unchecked: UncheckedPool, ranks: int) -> None:
    """Catches a transpose of the wrong sizes, a buffer that is read before it is filled, and padding that becomes data."""
    unchecked.run(ranks, compare)


def order(handle: Any) -> list[list[str]]:
    """What the graphs of both passes do, in order: communicate, compute, wait."""
    group = Group(handle)
    names = {"all_to_all_single": "launch", "wait_tensor": "wait", "mul": "compute"}
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        called = [
            str(node.target).split(".")[1]
            for node in graph.graph.nodes
            if node.op == "call_function" and "." in str(node.target)
        ]
        graphs.append([names[name] for name in called if name in names])
        return graph.forward

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    rows, columns = shard_sizes(ROWS, group.size), shard_sizes(COLUMNS, group.size)

    def step(x: Tensor, w: Tensor) -> Tensor:
        pending = start(x, Switch(group, 1, 2, rows, columns))
        other = (w * w).sum()
        return pending.wait() + other

    x = torch.ones(1, rows[group.rank], COLUMNS, 1, requires_grad=True)
    torch.compile(step, fullgraph=True, backend=backend)(x, torch.ones(3, requires_grad=True)).sum().backward()
    torch.compiler.reset()
    return graphs


def test_a_compiled_collective_hides_behind_computation_in_both_passes(unchecked: UncheckedPool) -> None:
    """Catches a wait directly after its launch in a compiled graph, forward or backward."""
    for forward, backward in unchecked.run(2, order):
        assert forward == ["launch", "compute", "wait"]
        assert (backward[0], *set(backward[1:-1]), backward[-1]) == ("launch", "compute", "wait")
