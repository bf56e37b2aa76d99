"""Operators with a driver of Triton that has no GPU and a compiler that compiles nothing; what is launched is written down."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.model.kernels import triton_kernels
from evodsp.model.kernels.triton import LAUNCHED
from evodsp.model.kernels.triton_kernels import launch
from scripts.benchmarks.host_time import NoGpu, shifted

Launched = list[tuple[Any, ...]]


class Kernel:
    """Stands for a compiled kernel. Launching it writes down what Triton hands over."""

    def __init__(self, specialisation: str, launched: Launched) -> None:
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
        self.function: object = specialisation
        self.packed_metadata = ("warps", "shared memory")
        self._run = lambda *arguments: launched.append(arguments)

    @property
    def run(self) -> Callable[..., object]:
        """As Triton's."""
        return self._run

    def launch_metadata(self, *_: Any) -> str:
        """As Triton's: for hooks."""
        return "for hooks"


class Driver(NoGpu):
    """Tests choose its stream."""

    stream = 1

    def get_current_stream(self, device: int) -> int:
        """As torch's current stream."""
        return self.stream


@contextmanager
def written_down(patch: pytest.MonkeyPatch) -> Iterator[tuple[Launched, Driver]]:
    """Yields the list of what kernels are launched with, one tuple each, and the driver. Operators begin without plans."""
    import triton
    from triton.runtime import JITFunction
    from triton.runtime import driver as active

    launched: Launched = []
    kernels: dict[str, Kernel] = {}

    def compiled(src: Any, target: Any = None, options: Any = None, **_: Any) -> Kernel:
        """One kernel for each specialisation: what Triton makes of types, constants and divisibility."""
        name = f"{src.fn.__qualname__} {src.signature} {src.constants} {src.attrs} {options}"
        return kernels.setdefault(name, Kernel(name, launched))

    patch.setattr(triton.compiler, "compile", compiled)
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        for function in vars(importlib.import_module(f"{triton_kernels.__name__}.{module.name}")).values():
            if isinstance(function, JITFunction):
                patch.setattr(function, "device_caches", defaultdict(function.create_binder))
    patch.setattr(active, "_active", driver := Driver())
    forget()
    try:
        yield launched, driver
    finally:
        forget()


def forget() -> None:
    """Forget the plans of all operators."""
    for operator in LAUNCHED.values():
        operator.forget()


def normal(launched: Launched, inputs: Sequence[Any], results: Tensor | Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Of each launch grid, kernel and arguments. An address is the tensor that it is in, and the distance from its start.

    Memory that is neither an input nor a result gets numbers in the order in which it appears.
    """
    tensors = [*(x for x in inputs if isinstance(x, Tensor)), *([results] if isinstance(results, Tensor) else results)]
    ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
    others: dict[int, str] = {}

    def place(address: int) -> tuple[Any, ...]:
        for number, (begin, size) in enumerate(ranges):
            if begin <= address < begin + size:
                return number, address - begin
        return others.setdefault(address, f"other {len(others)}"), address % 16

    found = []
    for arguments in launched:
        head, tail = arguments[:3] + arguments[4:6], arguments[9:]
        numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in tail]
        # Sizes are far smaller than addresses.
        found.append((*head, *(place(x) if isinstance(x, int) and x > 1 << 32 else x for x in numbers)))
    return found


def repeated(launched: Launched) -> bool:
    """Whether these launches did not pass Triton, which hands over tensors."""
    return not any(isinstance(x, Tensor) for arguments in launched for x in arguments)


def calls(size: int, width: int, dtype: torch.dtype) -> Iterator[tuple[launch.Operator, list[Any]]]:
    """A call of each operator, on tensors with this many positions and channels."""
    own = {name.removeprefix("evodsp::"): operator for name, operator in LAUNCHED.items()}

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.ones(shape, dtype=of)

    x, weight, fp32 = draw(1, 3, size, width), draw(width, of=torch.float32), torch.float32
    statistics = draw(1, 3, size, of=fp32)
    yield own["layer_norm"], [x.transpose(1, 2), weight, weight, 1e-5]
    yield own["layer_norm_backward"], [x, x, weight, statistics, statistics]
    yield own["layer_norm_again"], [x, x, weight, weight]
    yield own["gate"], [x, x]
    yield own["gate_backward"], [x, x, x]
    numbers = [torch.zeros(1, dtype=torch.int64), 0.15, 0, size, 3, 2 * size, 1]
    yield own["dropout_add"], [x, x, *numbers]
    yield own["dropout_add_backward"], [x, *numbers, dtype]
    yield own["dropout_mask"], [torch.zeros(1, dtype=torch.int64), size * width, 0.15]
    yield from _triangle_calls(own, draw, size, 16 * launch.tiles(width, 16))
    operands = draw(1, 3, size, 4 * width)
    yield own["gated_operands"], [operands, draw(1, 3, size)]
    yield own["gated_operands_backward"], [draw(2, 1, width, 3, size), operands, draw(1, 3, size), fp32]
    yield own["hidden_backward"], [draw(size, width), draw(width, 4), draw(size, 4), dtype]
    products, counts = draw(size, 4, size, 4), draw(size, size, 1, of=fp32)
    yield own["outer_projection"], [products, draw(width, 16), draw(width), counts]
    yield own["outer_projection_backward"], [draw(size, size, width), products, draw(width, 16), None, fp32]
    q, key_value = draw(1, size, 2, width), draw(1, 3, size, 2, width)
    sums = draw(1, size, 2, width + 2, of=fp32)
    yield own["global_attention"], [q, key_value, draw(1, 3, size)]
    yield own["global_attention_backward"], [sums, q, key_value, draw(1, 3, size), sums]
    projected, keys = draw(1, 3, size, 4, 2, width), draw(1, 3, size)
    queries = size // 2
    for first, bias in ((0, None), (queries, draw(1, 2, queries, size))):
        yield own["attention"], [projected, keys, bias, first]
        count = size if bias is None else queries
        out, statistics = draw(1, 3, count, 2, width), draw(1, 3, 2, count, of=fp32)
        more = [projected, keys, bias, first, out, statistics, statistics, bias is not None]
        yield own["attention_backward"], [out, *more]


def _triangle_calls(
    own: dict[str, launch.Operator], draw: Callable[..., Tensor], size: int, width: int
) -> Iterator[tuple[launch.Operator, list[Any]]]:
    x, vector = draw(1, 3, size, width), draw(width, of=torch.float32)
    planes, layer, bias = draw(1, width, 3, size), draw(width, width), draw(width)
    pair = [x, draw(1, 3, size), vector, vector, draw(4 * width, width), draw(4 * width)]
    after = [x, planes, vector, vector, layer, bias, vector, vector, layer, bias]
    yield own["triangle_operands"], pair
    yield own["triangle_operands_backward"], [draw(2, 1, width, 3, size), *pair, layer, x, x]
    yield own["triangle_gate_weight_backward"], [x, vector, vector, x]
    for kept in (draw(1, size * width, of=torch.bool), None):
        yield own["triangle_output"], [*after, kept, 1, 1.25]
        yield own["triangle_output_backward"], [x, *after, kept, 1, 1.25]


__all__ = ["Driver", "Kernel", "Launched", "calls", "forget", "normal", "repeated", "shifted", "written_down"]
