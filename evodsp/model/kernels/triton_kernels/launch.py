"""How evodsp's kernels become torch operators, and the one way in which they are launched.

An operator is written once, as a *body*: a function that allocates its results and passes each grid to a function `launch`.
The body has three uses, which differ in `launch`:

- the operator itself: `launch` runs the grid on the device;
- its fake implementation, for FakeTensorMode and torch.compile: `launch` does nothing, and the results have no numbers;
- its report: `launch` writes the grid down, with the bytes that it moves (`Operator.launches`).

So the grids that are counted and compiled ahead of time are the grids that run. A body runs once for its plan (`plan.py`),
which is then repeated.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from evodsp.model.kernels.triton_kernels.plan import Plan, on_meta, plan_of
from evodsp.model.precision import is_tf32


@dataclass(frozen=True)
class Launch:
    """One grid of one kernel."""

    kernel: str
    """`module.function` in `device/`."""
    programs: int
    """Number of programs; the grid has one axis. An empty grid is not launched."""
    arguments: dict[str, Any]
    """Tensors, numbers, and tuples of strides, by the names of the kernel's parameters. The kernel does not read a None."""
    constants: dict[str, Any]
    """Compile-time constants: tile sizes and variants."""
    writes: tuple[str, ...]
    """Names of the tensors that the kernel fills. It reads the others."""
    warps: int = 4
    stages: int = 2
    """Depth of the software pipeline of loads."""

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, if every element of every tensor is moved once."""
        return sum(moved(x) for x in self.arguments.values() if isinstance(x, Tensor))

    @property
    def function(self) -> Any:
        """The kernel, as Triton's decorator returned it."""
        module, name = self.kernel.split(".")
        return getattr(importlib.import_module(f"{__package__}.device.{module}"), name)


def moved(x: Tensor) -> int:
    """Bytes of the elements of x; an axis that was expanded (stride 0) is read once."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride != 0 or size == 0 else 1
    return numel * x.element_size()


Launcher = Callable[[Launch], Any]
# Largest number of plans that an operator remembers: proteins of many lengths make many plans.
_PLANS = 1024
_UNKNOWN: Any = object()
_PLAIN = frozenset({Tensor, Parameter, type(None), bool, int, float, torch.dtype})


def run(launch: Launch) -> Any:
    """Launch the grid on the device of its tensors (or in Triton's interpreter, where TRITON_INTERPRET=1 is set).

    Returns the compiled kernel, or None of an empty grid and of the interpreter.
    """
    if launch.programs == 0:
        return None
    device = next(x.device for x in launch.arguments.values() if isinstance(x, Tensor))
    with torch.get_device_module(device).device(device) if device.type != "cpu" else torch.no_grad():
        return launch.function[(launch.programs,)](
            **launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages
        )


class Operator:
    """A body as a torch operator, `evodsp::<name>`. The operator does not modify its tensors, and its results do not alias
    them.

    A plain call repeats the body's plan (`plan.py`) at once: torch's dispatcher costs more than a short kernel takes. A call
    goes through the dispatcher if something has to see the operator: modes such as FakeTensorMode, torch.compile, functorch,
    tracing, a profiler, subclasses of tensors.
    """

    def __init__(self, name: str, schema: str, body: Callable[..., Any]) -> None:
        """`schema`: torch's notation of the arguments and results, without the name. `body`: function that takes `launch`,
        then the arguments of the schema.
        """
        self.name, self.body = f"evodsp::{name}", body
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self._with_gradients: Any = None
        self._call = torch.library.custom_op(self.name, self._repeat, mutates_args=(), schema=schema)
        self._call.register_fake(functools.partial(body, _ignore))

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _seen() or not _PLAIN.issuperset(map(type, arguments)):
            return self._call(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            function = self._with_gradients
            return self._call(*arguments) if function is None else function.apply(*arguments)
        plan, tensors = self._look_up(arguments)
        return self._call(*arguments) if plan is None else plan(tensors)

    @property
    def differentiable(self) -> bool:
        """Whether `differentiate` was called."""
        return self._with_gradients is not None

    @property
    def refused(self) -> bool:
        """Whether Triton differed from a plan's expectations, so that the body runs in each call."""
        return any(plan is not None and plan.refused for plan in self._plans.values())

    def forget(self) -> None:
        """Forget all plans, as before the first call."""
        self._plans = {}

    def _repeat(self, *arguments: Any) -> Any:
        """Run the operator on its device, by a plan if there is one."""
        plan, tensors = self._look_up(arguments)
        return self.body(run, *arguments) if plan is None else plan(tensors)

    def _look_up(self, arguments: Sequence[Any]) -> tuple[Plan | None, list[Tensor]]:
        """The plan for arguments like these, if there is one, and the tensors among them."""
        # The key begins with the settings behind `product_precision`, and holds everything on which a body may depend.
        key: list[Any] = [is_tf32()]
        tensors = []
        for x in arguments:
            if isinstance(x, Tensor):
                tensors.append(x)
                key += (x.shape, x.stride(), x.dtype, x.device)
            else:
                key.append(x)
        complete = tuple(key)
        plan = self._plans.get(complete, _UNKNOWN)
        if plan is _UNKNOWN:
            if len(self._plans) >= _PLANS:
                self._plans = {}
            plan = self._plans[complete] = plan_of(self.body, arguments, run)
        return (None if plan is None or plan.refused else plan), tensors

    def differentiate(
        self,
        backward: Callable[..., Any],
        keep: Callable[[Sequence[Any], Any], tuple[Tensor | None, ...]],
        note: Callable[[Any, Sequence[Any]], None] = lambda ctx, inputs: None,
    ) -> None:
        """Make the operator differentiable once.

        `keep(inputs, output)` returns the tensors to keep for the backward pass. `backward(ctx, *gradients)` returns the
        gradients of the inputs; a gradient that is not needed arrives as None. `note(ctx, inputs)` puts plain numbers for the
        backward pass on `ctx`.
        """

        def set_up(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*keep(inputs, output))
            note(ctx, inputs)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = self._repeat(*inputs)
            set_up(ctx, inputs, output)
            return output

        self._call.register_autograd(backward, setup_context=set_up)
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._with_gradients = type(self.name, (torch.autograd.Function,), methods)

    def launches(self, *arguments: Any) -> list[Launch]:
        """The grids that a call launches, without launching them. Only the shapes, strides and dtypes of tensors are used."""
        grids: list[Launch] = []
        self.body(grids.append, *(on_meta(x) for x in arguments))
        return [launch for launch in grids if launch.programs > 0]

    def report(self, arguments: Sequence[Any], *_: Any) -> tuple[int, int]:
        """Number of grids that a call launches, and the bytes they move. A counter may pass the keywords and the result of
        the call too; they are ignored.
        """
        grids = self.launches(*arguments)
        return len(grids), sum(launch.bytes_moved for launch in grids)


def _ignore(launch: Launch) -> None:
    pass


def _seen() -> bool:
    """Whether something has to see the torch operators that are called."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch.autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def tiles(size: int, tile: int) -> int:
    """Number of tiles that cover `size` elements."""
    return -(-size // tile)


def product_tile(size: int, limit: int, factor: Tensor) -> int:
    """The edge of a tile of a matrix product: at most `limit`, or half of it in single precision. Tensor cores need at least
    16.
    """
    most = limit if factor.element_size() < 4 else limit // 2
    return max(16, min(most, next_power_of_two(max(1, size))))


def product_precision() -> str:
    """The precision in which kernels multiply float32 factors: torch's current one."""
    return "tf32" if is_tf32() else "tf32x3"
