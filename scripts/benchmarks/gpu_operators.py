"""The operators of a block one by one: their arguments, caught in a real pass; their error; the least time that they can take.

Nothing here knows an operator's signature: arguments are those that the model gave, and the work of an operator is that of its
formula, counted on shapes. So a new operator or backend is measured without a change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from evodsp.model.kernels import reference
from evodsp.model.kernels.registry import Kernels, Operator
from evodsp.model.kernels.triton import REPORTS
from evodsp.model.kernels.triton_kernels.launch import moved

from .gpu_clock import Step


@dataclass(frozen=True)
class Call:
    """One call of an operator: its name and arguments, detached; gradients are wanted where `requires_grad` is set."""

    operator: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    autocast: torch.dtype | None
    """Autocast's precision where the model calls it; None: autocast is off there."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [x for x in tree_flatten((self.arguments, self.keywords))[0] if isinstance(x, Tensor)]

    @property
    def name(self) -> str:
        """The operator with the shape of its first argument."""
        return f"{self.operator} {'x'.join(map(str, self.tensors[0].shape))}"

    def changed(self, change: Callable[[Tensor], Tensor]) -> Call:
        """With other tensors, which require gradients as these do."""
        leaves, spec = tree_flatten((self.arguments, self.keywords))
        new = [
            change(x.detach()).detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves
        ]
        arguments, keywords = tree_unflatten(new, spec)
        return Call(self.operator, arguments, keywords, self.autocast)


def caught(make: Callable[[Kernels], Step], base: Kernels) -> list[Call]:
    """The different calls of one run of the step that `make` builds with some kernels, in order."""
    calls: dict[Any, Call] = {}

    def catching(name: str, function: Operator) -> Operator:
        def call(*arguments: Any, **keywords: Any) -> Any:
            found = Call(name, arguments, keywords, None)
            device = found.tensors[0].device.type
            if torch.is_autocast_enabled(device):
                found = dataclasses.replace(found, autocast=torch.get_autocast_dtype(device))
            key = (name, *((x.shape, x.stride(), x.dtype) for x in found.tensors))
            if key not in calls:
                calls[key] = found.changed(lambda x: x)
            return function(*arguments, **keywords)

        return call

    step = make(Kernels(**{f.name: catching(f.name, getattr(base, f.name)) for f in dataclasses.fields(base)}))
    for _ in step():
        pass
    return list(calls.values())


def results_of(call: Call, function: Callable[..., Any]) -> list[Tensor]:
    """All tensors that the function returns, under autocast if the model calls it so."""
    device = call.tensors[0].device.type
    with torch.autocast(device, call.autocast, cache_enabled=False) if call.autocast else nullcontext():
        found = function(*call.arguments, **call.keywords)
    return [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)]


def run_of(call: Call, function: Operator) -> Step:
    """The call's forward and backward pass by this function."""
    wanted = [x for x in call.tensors if x.requires_grad]

    def step() -> Iterator[str]:
        results = results_of(call, function)
        yield "forward"
        if wanted:
            torch.autograd.grad(results, wanted, [torch.ones_like(x) for x in results])
        yield "backward"

    return step


def error(call: Call, function: Operator) -> float:
    """The largest difference from the formula in float32, of the result and all gradients, each over its largest number."""
    exact = dataclasses.replace(call.changed(lambda x: x.float() if x.is_floating_point() else x), autocast=None)
    expected = _results(exact, getattr(reference, call.operator))
    largest = 0.0
    for x, y in zip(_results(call, function), expected, strict=True):
        largest = max(largest, float((x.float() - y).abs().max() / y.abs().max().clamp(min=1e-30)))
    return largest


def _results(call: Call, function: Operator) -> list[Tensor]:
    """The results, and the gradients of the tensors that want one."""
    results = results_of(call, function)
    wanted = [x for x in call.tensors if x.requires_grad]
    # Random, for a smooth gradient would vanish where a norm subtracts the mean, and only rounding would be left.
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    gradients = torch.autograd.grad(results, wanted, weights) if wanted else ()
    return [*(x.detach() for x in results), *gradients]


@dataclass(frozen=True)
class Work:
    """What one pass of an operator cannot do without."""

    bytes: int
    """Arguments read once, results written once. Of a backward pass: arguments and the gradient of the result read, the
    gradients of the arguments written."""
    products: int
    """Floating-point operations of the formula's matrix products."""

    def seconds(self, bandwidth: float, peak: float) -> float:
        """The roofline: the longer of the times that memory and that matrix products take at full speed."""
        return max(self.bytes / bandwidth, self.products / peak)


def work(call: Call) -> dict[str, Work]:
    """Of the forward and the backward pass; counted on shapes, so that it takes no time and no memory.

    Results count in the precision of the first argument.
    """

    def on_shapes(x: Tensor) -> Tensor:
        dtype = torch.float32 if x.is_floating_point() else x.dtype  # the formula wants one precision
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")

    shapes = dataclasses.replace(call.changed(on_shapes), autocast=None)
    with FlopCounterMode(display=False) as forward:
        results = results_of(shapes, getattr(reference, call.operator))
    written = sum(x.numel() for x in results) * call.tensors[0].element_size()
    moved_forward = sum(moved(x) for x in call.tensors) + written
    found = {"forward": Work(moved_forward, forward.get_total_flops())}
    if wanted := [x for x in shapes.tensors if x.requires_grad]:
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(results, wanted, [torch.empty_like(x) for x in results])
        gradients = sum(moved(x) for x in call.tensors if x.requires_grad)
        found["backward"] = Work(moved_forward + gradients, backward.get_total_flops())
    return found


class ReportedBytes(TorchDispatchMode):
    """Adds up the bytes that our own kernels report while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if report := REPORTS.get(f"{func.namespace}::{func.overloadpacket.__name__}"):
            self.bytes += report(args, kwargs or {}, result)[1]
        return result


def reported(call: Call, function: Operator) -> dict[str, int]:
    """Bytes that our own kernels move in each stage of the call, as they report them; stages without any are left out."""
    found: dict[str, int] = {}
    run = run_of(call, function)()
    while True:
        with ReportedBytes() as count:
            stage = next(run, None)
        if stage is None:
            return found
        if count.bytes:
            found[stage] = count.bytes
