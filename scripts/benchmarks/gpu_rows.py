"""What every part of the measurement on a GPU (`gpu.py`) is made of: cases, what they measure, and what they are given."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch

from evodsp.config import KernelsConfig
from evodsp.model.kernels import BACKENDS
from evodsp.model.kernels.operators import OPERATORS, Kernels, Operator, choose

from . import gpu_clock
from .gpu_cases import Sizes
from .gpu_clock import Step

HALF, SINGLE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Measured:
    """One number, or one fact."""

    quantity: str
    value: float | None
    unit: str = ""
    note: str = ""
    of: str = ""
    """A part of the case that it is of, such as a kernel; '' for the whole case."""


@dataclass(frozen=True)
class Row(Measured):
    """A line of the result: what was measured of which case."""

    part: str = ""
    case: str = ""
    backend: str = ""
    precision: str = ""


@dataclass(frozen=True)
class Case:
    """Something to measure."""

    name: str
    backend: str
    precision: str
    measure: Callable[[], Iterable[Measured]]


@dataclass(frozen=True)
class Setup:
    """What every part is given."""

    device: torch.device
    sizes: Sizes
    deadline: float
    """`time.monotonic()` at which the part must be over."""
    backends: tuple[str, ...] = tuple(BACKENDS)
    """Backends that are wanted; those that cannot run here are left out."""
    rows: tuple[Row, ...] = ()
    """What earlier parts found."""
    memory_gib: float | None = None
    """GiB of the device's memory that may be used, to try what a smaller device does; None: all."""

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def present(self) -> list[str]:
        """The wanted backends that can run here."""
        return [backend for backend in self.backends if not why_absent(backend, self.device)]

    def found(self, quantity: str) -> float | None:
        """A number of an earlier part; None if it is not there."""
        return next((row.value for row in self.rows if row.quantity == quantity), None)


@dataclass(frozen=True)
class Part:
    """A function that lists cases, and the seconds that they may take on a GPU."""

    name: str
    title: str
    seconds: float
    cases: Callable[[Setup], Iterator[Case]]
    processes: int = 1
    """Processes that share the cases: more than one for a part that times nothing and compiles kernels."""


def precision_name(dtype: torch.dtype) -> str:
    return "bf16-mixed" if dtype == HALF else "fp32"


def out_of_memory(error: Exception) -> bool:
    """Whether the device's memory was full. cuBLAS says so in words of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def cleaned(device: torch.device) -> None:
    """Return the memory of what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def why_absent(backend: str, device: torch.device) -> str:
    """Why a backend cannot run here; '' if it can."""
    devices = BACKENDS[backend].devices
    if devices and device.type not in devices:
        return f"it is for {', '.join(devices)}"
    try:
        importlib.import_module(BACKENDS[backend].module)
        if backend == "triton":
            importlib.import_module("triton")
    except ImportError as error:
        return str(error)
    return ""


def operators_of(backend: str) -> dict[str, Operator]:
    """The functions of a backend by the names of the operators."""
    module = importlib.import_module(BACKENDS[backend].module)
    return {name: getattr(module, name) for name in OPERATORS if hasattr(module, name)}


@cache
def chosen(
    backend: str, device: torch.device, dtype: torch.dtype, gradients: bool = True
) -> tuple[Kernels, list[Measured]]:
    """The operators of a run with `kernels.backend` set so; and which of them another backend computes."""
    kernels, choices = choose(KernelsConfig(backend=backend), device, dtype, gradients)
    others: dict[str, list[str]] = {}
    for choice in choices:
        if choice.backend != backend:
            others.setdefault(choice.backend, []).append(choice.operator)
    notes = [f"{other}: {', '.join(operators)}" for other, operators in others.items()]
    return kernels, [Measured("other backends", None, note="; ".join(notes))] if notes else []


def timed(setup: Setup, step: Step) -> dict[str, list[float]]:
    """Seconds of each stage, in as many runs as the sizes say."""
    return gpu_clock.timed(step, setup.device, setup.sizes.seconds, setup.sizes.runs)


def measured(setup: Setup, step: Step, replay: bool = False) -> Iterator[Measured]:
    """Time, memory and launches of a step, stage by stage. `replay`: also its time as CUDA graphs."""
    gpu_clock.drain(step)  # compiles kernels; Adam makes its state
    weighed = gpu_clock.memory(step, setup.device)
    times = timed(setup, step)
    for stage, seconds in times.items():
        spread = f"{1000 * min(seconds):.4g} to {1000 * max(seconds):.4g} in {len(seconds)} runs"
        yield Measured(stage, 1000 * median(seconds), "ms", spread)
    if setup.device.type == "cuda":
        yield Measured("host", 1000 * gpu_clock.host_seconds(step, setup.device), "ms", "to launch all")
    yield Measured("peak memory", weighed.peak, "MiB")
    if "backward" in times:
        yield Measured("kept for backward", weighed.after["forward"], "MiB", "results included")
    ran = gpu_clock.kernels(step, setup.device)
    if ran and not any(ran.values()):
        yield Measured("launches", None, note="torch's profiler saw none; it may lack permission")
    for stage, kernels in ran.items():
        own = [kernel for kernel in kernels if not kernel.copies]
        yield Measured(f"launches {stage}", len(own), "", f"{len(kernels) - len(own)} copies and fills besides")
        yield Measured(f"busy {stage}", 1000 * sum(kernel.seconds for kernel in kernels), "ms")
    if replay and setup.device.type == "cuda":
        yield from replayed(setup, step)


def replayed(setup: Setup, step: Step) -> Iterator[Measured]:
    """Time of each stage of a step as CUDA graphs."""
    for stage, seconds in timed(setup, gpu_clock.Replayed(step, setup.device)).items():
        spread = f"{1000 * min(seconds):.4g} to {1000 * max(seconds):.4g} in {len(seconds)} runs"
        yield Measured(f"replay {stage}", 1000 * median(seconds), "ms", spread)
