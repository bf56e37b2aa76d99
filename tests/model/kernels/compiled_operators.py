"""Compares operators under torch.compile with the same ones uncompiled. Run in a process without checks of array types."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import autograd_function_apply

from evodsp.model.kernels.operators import OPERATORS


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
