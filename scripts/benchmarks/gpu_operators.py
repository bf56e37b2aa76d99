"""The operators of a block one by one: their arguments, caught in a real pass; their error; the least time that they can take.

The part `checks`: each operator's result and all gradients, on what a block gives it, against the formula in float64; and the
same bits in a second run.

Nothing here knows an operator's signature: arguments are those that the model gave, and the work of an operator is that of its
formula, counted on shapes. So a new operator or backend is measured without a change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from evodsp.model.kernels import reference
from evodsp.model.kernels.operators import OPERATORS, Kernels, Operator, problem_of
from evodsp.model.kernels.triton import LAUNCHED
from evodsp.model.kernels.triton_kernels.launch import Launch, moved

from . import gpu_cases
from .gpu_clock import Step
from .gpu_rows import HALF, SINGLE, Case, Measured, Setup, operators_of, precision_name, why_absent


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

    step = make(Kernels(**{name: catching(name, getattr(base, name)) for name in OPERATORS}))
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


@dataclass(frozen=True)
class Error:
    """The largest error of an operator's results and gradients, each over its largest number, and which one has it."""

    largest: float
    of: str

    def __str__(self) -> str:
        return f"{self.of} {self.largest:.1e}"


def error(call: Call, function: Operator) -> Error:
    """The error against the formula in float64."""
    exact = dataclasses.replace(call.changed(lambda x: x.double() if x.is_floating_point() else x), autocast=None)
    expected = _results(exact, getattr(reference, call.operator))
    errors = []
    for (name, x), (_, y) in zip(_results(call, function), expected, strict=True):
        largest = float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-30)) if y.numel() else 0.0
        errors.append(Error(largest, name))
    return max(errors, key=lambda found: math.inf if math.isnan(found.largest) else found.largest)


def same_twice(call: Call, function: Operator) -> bool:
    """Whether a second run gives the same bits."""
    runs = zip(_results(call, function), _results(call, function), strict=True)
    return all(torch.equal(x, y) for (_, x), (_, y) in runs)


def _results(call: Call, function: Operator) -> list[tuple[str, Tensor]]:
    """The results, and the gradients of the tensors that want one, with names."""
    results = results_of(call, function)
    wanted = [(number, x) for number, x in enumerate(call.tensors) if x.requires_grad]
    # Random, for a smooth gradient would vanish where a norm subtracts the mean, and only rounding would be left. In few
    # digits, so that it is the same number in every precision.
    generator = torch.Generator(results[0].device).manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, device=x.device).bfloat16().to(x.dtype) for x in results]
    gradients = torch.autograd.grad(results, [x for _, x in wanted], weights) if wanted else ()
    names = [f"result {number}" for number in range(len(results))]
    names += [f"gradient of tensor {number}" for number, _ in wanted]
    return list(zip(names, [*(x.detach() for x in results), *gradients], strict=True))


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
    """The work of the forward and of the backward pass, counted on shapes, which takes no time and no memory.

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


class Grids(TorchDispatchMode):
    """Notes the grids that our own kernels launch while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if operator := LAUNCHED.get(f"{func.namespace}::{func.overloadpacket.__name__}"):
            self.launches += operator.launches(*args)
        return result


def grids(step: Step) -> dict[str, list[Launch]]:
    """The grids of our own kernels in each stage of a step, in order."""
    found: dict[str, list[Launch]] = {}
    run = step()
    while True:
        with Grids() as seen:
            stage = next(run, None)
        if stage is None:
            return found
        found[stage] = seen.launches


def reported(call: Call, function: Operator) -> dict[str, int]:
    """Bytes that our own kernels move in each stage of the call, as they report them; stages without any are left out."""
    found = {stage: sum(launch.bytes_moved for launch in own) for stage, own in grids(run_of(call, function)).items()}
    return {stage: moved for stage, moved in found.items() if moved}


# ---- Checks ----

LIMITS = {SINGLE: 1e-5, HALF: 2e-2}
"""Largest error of a result or gradient, as a share of its largest number."""
OF_FORMULA = 1.5
"""Where the formula in this precision has a larger error, this many times its error is allowed."""


def checks(setup: Setup) -> Iterator[Case]:
    """Every operator of every backend: the self-check of a run's start, and the error on what blocks give it."""
    dtypes = (HALF, SINGLE)
    for backend in setup.backends:
        if absent := why_absent(backend, setup.device):
            yield Case("all", backend, "", partial(_absent, absent))
    for dtype in dtypes:
        for kind, first, residues in setup.sizes.checks:
            for backend in setup.present:
                if backend in ("reference", "flash_attn"):  # the formulas themselves; a package without float32
                    continue
                for operator, function in operators_of(backend).items():
                    yield Case(
                        f"{kind} {first} x {residues}: {operator}", backend, precision_name(dtype),
                        partial(_error, setup, kind, first, residues, dtype, operator, function),
                    )  # fmt: skip
    for dtype in dtypes:
        for backend in setup.present:
            for operator, function in operators_of(backend).items():
                if backend != "flash_attn" or dtype != SINGLE:
                    yield Case(
                        f"self-check: {operator}", backend, precision_name(dtype),
                        partial(_self_check, operator, function, setup.device, dtype),
                    )  # fmt: skip


def _absent(why: str) -> Iterator[Measured]:
    yield Measured("absent", None, note=why)


def _self_check(operator: str, function: Operator, device: torch.device, dtype: torch.dtype) -> Iterator[Measured]:
    if problem := problem_of(operator, function, device, dtype):
        raise ValueError(f"self-check: {problem}")
    yield Measured("self-check", None, note="ok")


def _error(
    setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype, operator: str, function: Operator
) -> Iterator[Measured]:
    """The largest error in any of the block's calls of an operator, and that of the formula in this precision."""
    formula, worst = operators_of("reference")[operator], ""
    found, peer = 0.0, 0.0
    for call in block_calls(setup, kind, first, residues, dtype):
        if call.operator != operator:
            continue
        own, other = error(call, function), error(call, formula)
        if not own.largest <= max(LIMITS[dtype], OF_FORMULA * other.largest):  # NaN is no good either
            worst = f"{call.name}: {own} of the largest number; the formula's {other}"
        if not same_twice(call, function):
            worst = f"{call.name}: a second run gave other bits"
        found, peer = max(found, own.largest), max(peer, other.largest)
    if found:
        yield Measured("error", found, "", f"the formula in this precision: {peer:.1e}")
    if worst:
        raise ValueError(worst)


@cache
def _calls(
    sizes: gpu_cases.Sizes, kind: str, first: int, residues: int, device: torch.device, dtype: torch.dtype
) -> list[Call]:
    config = gpu_cases.config_of(sizes)
    return caught(lambda kernels: gpu_cases.block(config, kind, first, residues, device, dtype, kernels), Kernels())


def block_calls(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype) -> list[Call]:
    """The different calls of operators in one block."""
    return _calls(setup.sizes, kind, first, residues, setup.device, dtype)
