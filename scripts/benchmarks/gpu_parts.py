"""The parts of the measurement on a GPU (`gpu.py`): what each has to measure, as a list of cases.

A case measures one thing by itself. If it fails, or there is no time for it, the others go on.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import torch

from evodsp.config import KernelsConfig
from evodsp.model.kernels.backends import BACKENDS
from evodsp.model.kernels.registry import Kernels, Operator, choose
from evodsp.model.kernels.self_check import problem_of

from . import gpu_cases, gpu_clock, gpu_operators
from .gpu_cases import Inputs, Sizes
from .gpu_clock import MIB, Step

HALF, SINGLE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Measured:
    """One number, or one fact."""

    quantity: str
    value: float | None
    unit: str = ""
    note: str = ""


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

    @property
    def left(self) -> float:
        """Seconds."""
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


# ---- The machine ----


def machine(setup: Setup) -> Iterator[Case]:
    """What it is, and the bandwidth and the speed of products that it reaches: the roofline of all other parts."""
    yield Case("machine", "", "", partial(_about, setup.device))
    yield Case("copy", "", "", partial(_copy, setup))
    for name, dtype, tf32 in (("bf16", HALF, False), ("fp32", SINGLE, False), ("tf32", SINGLE, True)):
        if not tf32 or setup.device.type == "cuda":
            yield Case("matrix product", "", name, partial(_product, setup, name, dtype, tf32))


def _about(device: torch.device) -> Iterator[Measured]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield Measured("device", None, note=f"{properties.name}, sm_{properties.major}{properties.minor}")
        yield Measured("memory of the device", properties.total_memory / MIB, "MiB")
        yield Measured("multiprocessors", properties.multi_processor_count)
    else:
        yield Measured("device", None, note=f"CPU, {platform.machine()}")


def _copy(setup: Setup) -> Iterator[Measured]:
    x = torch.zeros(setup.sizes.copied, dtype=torch.uint8, device=setup.device)
    y = torch.empty_like(x)

    def step() -> Iterator[str]:
        y.copy_(x)
        yield "copy"

    yield Measured("bandwidth", 2 * x.numel() / _median(setup, step, "copy") / 1e9, "GB/s")


def _product(setup: Setup, name: str, dtype: torch.dtype, tf32: bool) -> Iterator[Measured]:
    n = setup.sizes.matrix
    x = torch.randn(n, n, device=setup.device).to(dtype)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:

        def step() -> Iterator[str]:
            x @ x
            yield "product"

        yield Measured(f"products {name}", 2 * n**3 / _median(setup, step, "product") / 1e12, "TFLOP/s")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _median(setup: Setup, step: Step, stage: str) -> float:
    return median(_timed(setup, step)[stage])


def _timed(setup: Setup, step: Step) -> dict[str, list[float]]:
    return gpu_clock.timed(step, setup.device, setup.sizes.seconds, setup.sizes.runs)


# ---- Are the operators right? ----


def checks(setup: Setup) -> Iterator[Case]:
    """Every operator of every backend: the self-check of a run's start, and the error on what a small block gives it."""
    device = setup.device
    dtypes = (SINGLE, HALF)
    for backend in setup.backends:
        if absent := why_absent(backend, device):
            yield Case("all", backend, "", partial(_absent, absent))
            continue
        for dtype in dtypes:
            if backend == "flash_attn" and dtype == SINGLE:
                continue  # the package has no float32
            for operator, function in operators_of(backend).items():
                yield Case(
                    operator, backend, precision_name(dtype),
                    partial(_self_check, operator, function, device, dtype),
                )  # fmt: skip
    for dtype in dtypes:
        for kind, first, residues in setup.sizes.checks:
            name = f"{kind} {first} x {residues}"
            yield Case(name, "", precision_name(dtype), partial(_errors, setup, kind, first, residues, dtype))


def _absent(why: str) -> Iterator[Measured]:
    yield Measured("absent", None, note=why)


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
    return {f.name: getattr(module, f.name) for f in dataclasses.fields(Kernels) if hasattr(module, f.name)}


def _self_check(operator: str, function: Operator, device: torch.device, dtype: torch.dtype) -> Iterator[Measured]:
    if problem := problem_of(operator, function, device, dtype):
        raise ValueError(f"self-check: {problem}")
    yield Measured("self-check", None, note="ok")


def _errors(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype) -> Iterator[Measured]:
    """For each operator and backend the largest error in any of the block's calls."""
    calls = block_calls(setup, kind, first, residues, dtype)
    for backend in setup.present:
        for operator, function in operators_of(backend).items():
            own = [call for call in calls if call.operator == operator]
            if own and not (backend == "flash_attn" and dtype == SINGLE):
                largest = max(gpu_operators.error(call, function) for call in own)
                yield Measured(f"error of {operator}, {backend}", largest)


def block_calls(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype) -> list[gpu_operators.Call]:
    """The different calls of operators in one block."""
    config = gpu_cases.config_of(setup.sizes)
    return gpu_operators.caught(
        lambda kernels: gpu_cases.block(config, kind, first, residues, setup.device, dtype, kernels), Kernels()
    )


# ---- Time, memory and launches ----


def blocks(setup: Setup) -> Iterator[Case]:
    """One block of each stack, forward and backward, by each backend."""
    for kind, first, residues in setup.sizes.blocks:
        for dtype in (HALF, SINGLE) if (kind, first, residues) == setup.sizes.blocks[0] else (HALF,):
            for backend in setup.present:
                yield Case(
                    f"{kind} {first} x {residues}", backend, precision_name(dtype),
                    partial(_block, setup, kind, first, residues, dtype, backend),
                )  # fmt: skip


def _block(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype, backend: str) -> Iterator[Measured]:
    kernels, others = chosen(backend, setup.device, dtype)
    config = gpu_cases.config_of(setup.sizes)
    yield from others
    yield from measured(setup, gpu_cases.block(config, kind, first, residues, setup.device, dtype, kernels))


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


def measured(setup: Setup, step: Step) -> Iterator[Measured]:
    """Time, memory and launches of a step, stage by stage."""
    for _stage in step():  # compiles kernels; Adam makes its state
        pass
    weighed = gpu_clock.memory(step, setup.device)
    times = _timed(setup, step)
    for stage, seconds in times.items():
        spread = f"{1000 * min(seconds):.4g} to {1000 * max(seconds):.4g} in {len(seconds)} runs"
        yield Measured(stage, 1000 * median(seconds), "ms", spread)
    yield Measured("peak memory", weighed.peak, "MiB")
    if "backward" in times:
        yield Measured("kept for backward", weighed.after["forward"], "MiB", "results included")
    ran = gpu_clock.kernels(step, setup.device)
    if ran and not any(ran.values()):
        yield Measured("launches", None, note="torch's profiler saw none; it may lack permission")
        return
    for stage, kernels in ran.items():
        own = [kernel for kernel in kernels if not kernel.copies]
        yield Measured(f"launches {stage}", len(own), "", f"{len(kernels) - len(own)} copies and fills besides")
        yield Measured(f"busy {stage}", 1000 * sum(kernel.seconds for kernel in kernels), "ms")


# ---- Operators against the roofline ----


def operators(setup: Setup) -> Iterator[Case]:
    """Each call of an operator in a block: time by each backend, the roofline, and the fraction of it that is reached."""
    for kind, first, residues in setup.sizes.operators:
        calls = block_calls(setup, kind, first, residues, HALF)
        for number, call in enumerate(calls, start=1):
            for backend in setup.present:
                if function := operators_of(backend).get(call.operator):
                    yield Case(
                        f"{kind} {first} x {residues}: {number} {call.name}", backend, precision_name(HALF),
                        partial(_operator, setup, call, function),
                    )  # fmt: skip


def _operator(setup: Setup, call: gpu_operators.Call, function: Operator) -> Iterator[Measured]:
    bandwidth, peak = setup.found("bandwidth"), setup.found("products bf16")
    needed = gpu_operators.work(call)
    step = gpu_operators.run_of(call, function)
    times, ran = _timed(setup, step), gpu_clock.kernels(step, setup.device)
    moved = gpu_operators.reported(call, function)
    for stage, least in needed.items():
        seconds = median(times[stage])
        yield Measured(stage, 1e6 * seconds, "us")
        if bandwidth and peak:
            roofline = least.seconds(bandwidth * 1e9, peak * 1e12)
            yield Measured(f"roofline {stage}", 1e6 * roofline, "us", _limit(least, bandwidth * 1e9, peak * 1e12))
            yield Measured(f"fraction {stage}", roofline / seconds)
        if bandwidth and stage in moved:
            rate = moved[stage] / seconds / 1e9
            yield Measured(f"bandwidth {stage}", rate, "GB/s", f"{rate / bandwidth:.2f} of the copy's; bytes reported")
        for kernel in ran.get(stage, ()):
            yield Measured(f"kernel {stage}", 1e6 * kernel.seconds, "us", kernel.name[:80])


def _limit(least: gpu_operators.Work, bandwidth: float, peak: float) -> str:
    return "by memory" if least.bytes / bandwidth > least.products / peak else "by matrix products"


# ---- The whole model ----


def whole_model(setup: Setup) -> Iterator[Case]:
    """A training step and a pass of inference of the preset's full depth, by each backend."""
    sizes = setup.sizes
    steps = (
        ("training step", sizes.training, gpu_cases.training),
        ("inference", sizes.inference, gpu_cases.inference),
    )
    wanted = [(HALF, backend) for backend in setup.present] + [(SINGLE, backend) for backend in setup.present[:1]]
    for dtype, backend in wanted:
        for name, inputs, make in steps:
            yield Case(
                f"{name}, {inputs}",
                backend,
                precision_name(dtype),
                partial(_model, setup, make, inputs, dtype, backend),
            )


MakeStep = Callable[[gpu_cases.AlphaFold, Inputs, torch.device, torch.dtype], Step]


def _model(setup: Setup, make: MakeStep, inputs: Inputs, dtype: torch.dtype, backend: str) -> Iterator[Measured]:
    kernels, others = chosen(backend, setup.device, dtype, make is gpu_cases.training)
    yield from others
    model = gpu_cases.model(gpu_cases.config_of(setup.sizes), kernels, setup.device)
    yield from measured(setup, make(model, inputs, setup.device, dtype))


# ---- The longest protein ----


def longest(setup: Setup) -> Iterator[Case]:
    """The largest R whose pass of inference, and whose training step, fits the device's memory; with the default kernels."""
    sizes = setup.sizes
    for name, inputs, make in (
        ("inference", sizes.inference, gpu_cases.inference),
        ("training step", sizes.training, gpu_cases.training),
    ):
        rows = f"{name}, {inputs.sequences} + {inputs.extra} sequences, {inputs.templates} templates"
        yield Case(rows, "auto", precision_name(HALF), partial(_longest, setup, make, inputs))


def _longest(setup: Setup, make: MakeStep, inputs: Inputs) -> Iterator[Measured]:
    kernels, _ = chosen("auto", setup.device, HALF, make is gpu_cases.training)
    model = gpu_cases.model(gpu_cases.config_of(setup.sizes), kernels, setup.device)
    # The part's second case needs time, too.
    until = time.monotonic() + (setup.left / 2 if make is gpu_cases.inference else setup.left)

    problems: dict[int, str] = {}

    def fits(residues: int) -> bool:
        full, wrong = False, ""
        try:
            for _stage in make(model, dataclasses.replace(inputs, residues=residues), setup.device, HALF)():
                if setup.device.type == "cuda":
                    torch.cuda.synchronize(setup.device)
        except Exception as error:  # what it refers to must be gone before memory is returned, below
            full, wrong = out_of_memory(error), f"R = {residues}: {type(error).__name__}: {error}"
        model.zero_grad()
        cleaned(setup.device)
        if wrong and not full:
            problems[residues] = wrong
        return not wrong

    fits(inputs.residues)  # compiles kernels, which would count as the time of the first trial
    found = largest(fits, inputs.residues, setup.sizes.most, setup.sizes.step, until)
    note = "the next one does not fit" if found.bounded else "larger ones were not tried, for lack of time or by choice"
    yield Measured("largest R" if found.bounded else "R that fits at least", found.residues, "", note)
    yield Measured("time at it", 1000 * found.seconds, "ms", "one pass")
    if problems:
        raise RuntimeError("; ".join(problems.values()))


@dataclass(frozen=True)
class Largest:
    """The result of a bisection."""

    residues: int
    """0 if even the smallest does not fit."""
    bounded: bool
    """Whether the next multiple of the step was found not to fit."""
    seconds: float
    """What the trial of `residues` took."""


def largest(fits: Callable[[int], bool], start: int, most: int, step: int, until: float) -> Largest:
    """The largest multiple of `step`, up to `most`, that fits: `start` is doubled until one does not fit, then bisected.

    Stops when the next trial might not be over at `until` (as `time.monotonic()`): time grows with the third power, and half of
    that is added for what grows faster.
    """
    good, bad, took, trial = 0, 0, 0.0, -(-start // step) * step
    while True:
        if good and time.monotonic() + 1.5 * took * (trial / good) ** 3 > until:
            return Largest(good, False, took)
        begin = time.monotonic()
        if fits(trial):
            good, took = trial, time.monotonic() - begin
        else:
            bad = trial
        if not bad:
            if 2 * good > most:
                return Largest(good, False, took)
            trial = 2 * good
        elif bad - good <= step:
            return Largest(good, True, took)
        else:
            trial = (good + bad) // 2 // step * step


PARTS = (
    Part("machine", "The machine, and the speeds that it reaches", 25, machine),
    Part("checks", "Operators against their formulas", 110, checks),
    Part("blocks", "One block, forward and backward", 130, blocks),
    Part("operators", "Operators against the roofline", 80, operators),
    Part("model", "The whole model", 95, whole_model),
    Part("longest", "The longest protein", 80, longest),
)
