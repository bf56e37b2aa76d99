"""Operators under torch.compile: the same results and gradients, on every version of torch that is allowed. Compared in
a process without checks of array types."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.autograd_function import autograd_function_apply

from evodsp.model.kernels.operators import OPERATORS
from tests.ranks import in_a_fork


def check(backend: str, operator: str, dtype: torch.dtype = torch.float32) -> int:
    """The number of autograd.Functions in the operator's graph. Raises if compiling changes results or gradients.

    It would do so silently with torch 2.11 where a Function returns an object that has another name, too; that is looked for in
    the graph, so that it is found with any torch.
    """
    torch.compiler.reset()
    function = getattr(importlib.import_module(f"evodsp.model.kernels.{backend}"), operator)
    spec = OPERATORS[operator]
    inputs = spec.inputs(torch.device("cpu"), dtype)
    count = [0]

    def compiler(graph: torch.fx.GraphModule, examples: Any) -> Any:
        def run(*arguments: Any) -> Any:
            return _Outer(graph, count).run(*arguments)

        return run

    compiled = torch.compile(lambda *tensors: spec.call(function, tensors), fullgraph=True, backend=compiler)
    wanted = spec.differentiable(inputs)
    found = []
    for run in (compiled, lambda *tensors: spec.call(function, tensors)):
        arguments = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(inputs)]
        results = run(*arguments)
        weights = [torch.linspace(-1, 2, x.numel()).to(x.dtype).view(x.shape) for x in results]
        gradients = torch.autograd.grad(results, [arguments[n] for n in wanted], weights)
        found.append([*results, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    return count[0]


class _Outer(torch.fx.Interpreter):
    """Runs a graph, and looks at the forward pass of each autograd.Function in it."""

    def __init__(self, graph: torch.fx.GraphModule, count: list[int]) -> None:
        super().__init__(graph)
        self._count = count

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is autograd_function_apply:
            self._count[0] += 1
            used = {user.args[1] for user in n.users}
            forward, _, *inputs = self.fetch_args_kwargs_from_env(n)[0]
            inner = _Inner(forward)
            with torch.no_grad():
                results = inner.run(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))[0]
            for number in used:
                names = [name for name, value in inner.values.items() if value is results[number]]
                assert len(names) == 1, f"{names} are one object, and it is returned"
        return super().run_node(n)


class _Inner(torch.fx.Interpreter):
    """Runs a graph, and keeps all values."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.values[n.name] = result = super().run_node(n)
        return result


# Those that are an autograd.Function around pieces that differ from `chunked`'s.
OF_PIECES = ["gated_linear", "gated_output", "gated_projection"]


@pytest.mark.verify_but("triangle_multiplication")
@pytest.mark.parametrize("operator", OPERATORS)
def test_chunked(operator: str) -> None:
    """Catches an operation in place whose result a Function returns: with torch 2.11 all gradients were 0."""
    functions = {"layer_norm": 0, "dropout_add": 0, "linear": 0}
    # Two shards, in the example; product and output; gate and output.
    functions |= {"global_attention": 2, "triangle_multiplication": 2, "gated_output": 2}
    assert in_a_fork(check, "chunked", operator) == functions.get(operator, 1)


@pytest.mark.verify
@pytest.mark.parametrize("operator", OF_PIECES)
def test_triton(interpreter: Callable[..., Any], operator: str) -> None:
    """Catches the same of the pieces that GPUs take: `contiguous` with nothing to do, for example."""
    assert interpreter(check, "triton", operator) == (2 if operator == "gated_output" else 1)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("dtype", "functions"),
    [
        pytest.param(torch.float32, 2, id="separate"),
        pytest.param(torch.float16, 1, id="fused"),
    ],
)
def test_triangle_multiplication(interpreter: Callable[..., Any], dtype: torch.dtype, functions: int) -> None:
    """Catches the same of its separate and of its fused kernels."""
    assert interpreter(check, "triton", "triangle_multiplication", dtype) == functions
