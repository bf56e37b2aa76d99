"""How own kernels become operators of torch, and the one way in which they are launched.

An operator is written once, as a *body*: a function that allocates its results and hands each grid it wants to a function
`launch`. What that function does decides what the body is:

- the operator itself: `launch` runs the grid on the device;
- its fake implementation, for FakeTensorMode and torch.compile: `launch` does nothing, and the results have no numbers;
- its report: `launch` writes the grid down, with the bytes that it moves (`Operator.launches`).

So what is counted and compiled ahead of time is what runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One grid of one kernel."""

    kernel: str
    """`module.function` in `device/`."""
    programs: int
    """Size of the grid, which has one axis. An empty grid is not launched."""
    arguments: dict[str, Any]
    """Tensors, numbers, and tuples of strides, by the names of the kernel's parameters. None: the kernel does not read it."""
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


Launcher = Callable[[Launch], object]


def run(launch: Launch) -> None:
    """Launch the grid on the device of its tensors (or in Triton's interpreter, where TRITON_INTERPRET=1 is set)."""
    if launch.programs == 0:
        return
    device = next(x.device for x in launch.arguments.values() if isinstance(x, Tensor))
    with torch.get_device_module(device).device(device) if device.type != "cpu" else torch.no_grad():
        launch.function[(launch.programs,)](
            **launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages
        )


class Operator:
    """A body as an operator of torch, `evodsp::<name>`. Its tensors are not modified and do not alias its results."""

    def __init__(self, name: str, schema: str, body: Callable[..., Any]) -> None:
        """`schema`: as torch writes it, without the name. `body`: called with `launch`, then the arguments of the schema."""
        self.name, self.body = f"evodsp::{name}", body
        self.differentiable = False
        self._call = torch.library.custom_op(self.name, functools.partial(body, run), mutates_args=(), schema=schema)
        self._call.register_fake(functools.partial(body, _ignore))

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def differentiate(
        self,
        backward: Callable[..., Any],
        keep: Callable[[Sequence[Any], Any], tuple[Tensor | None, ...]],
        note: Callable[[Any, Sequence[Any]], None] = lambda ctx, inputs: None,
    ) -> None:
        """Make the operator differentiable once.

        `keep(inputs, output)`: the tensors that the backward pass needs: nothing else is kept. `backward(ctx, *gradients)`:
        the gradients of the inputs; a gradient that nobody needs arrives as None. `note(ctx, inputs)`: puts plain numbers
        that the backward pass needs on `ctx`.
        """

        def set_up(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*keep(inputs, output))
            note(ctx, inputs)

        self.differentiable = True
        self._call.register_autograd(backward, setup_context=set_up)

    def launches(self, *arguments: Any) -> list[Launch]:
        """The grids that a call launches, without launching them. Of tensors only shapes, strides and dtypes are used."""
        grids: list[Launch] = []
        self.body(grids.append, *(_on_meta(x) for x in arguments))
        return [launch for launch in grids if launch.programs > 0]

    def report(self, arguments: Sequence[Any], *_: Any) -> tuple[int, int]:
        """Number of grids that a call launches, and the bytes they move. A counter may add keywords and result of the call."""
        grids = self.launches(*arguments)
        return len(grids), sum(launch.bytes_moved for launch in grids)


def _ignore(launch: Launch) -> None:
    pass


def _on_meta(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def tiles(size: int, tile: int) -> int:
    """How many tiles cover `size` elements."""
    return -(-size // tile)


def product_tile(size: int, limit: int, factor: Tensor) -> int:
    """The edge of a tile that is multiplied: at most `limit`, in single precision half of it. Tensor cores need 16 at least."""
    most = limit if factor.element_size() < 4 else limit // 2
    return max(16, min(most, next_power_of_two(max(1, size))))


def product_precision() -> str:
    """How kernels multiply factors in float32: as torch does."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
