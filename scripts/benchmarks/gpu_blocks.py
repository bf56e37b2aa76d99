"""The machine's speeds, and blocks on it: time, memory, launches, and where the time goes."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from evodsp.model.kernels.operators import Operator

from . import gpu_cases, gpu_clock, gpu_operators
from .gpu_clock import MIB, Step
from .gpu_operators import block_calls
from .gpu_rows import HALF, SINGLE, Case, Measured, Setup, chosen, measured, operators_of, precision_name, timed

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
    x = torch.randint(256, (setup.sizes.copied,), dtype=torch.uint8, device=setup.device)  # zeros may be copied faster
    y = torch.empty_like(x)

    def step() -> Iterator[str]:
        y.copy_(x)
        yield "copy"

    yield Measured("bandwidth", 2 * x.numel() / median(timed(setup, step)["copy"]) / 1e9, "GB/s")


def _product(setup: Setup, name: str, dtype: torch.dtype, tf32: bool) -> Iterator[Measured]:
    n = setup.sizes.matrix
    x, y = (torch.randn(n, n, device=setup.device).to(dtype) for _ in range(2))
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:

        def step() -> Iterator[str]:
            x @ y
            yield "product"

        seconds = median(timed(setup, step)["product"])
        yield Measured(f"products {name}", 2 * n**3 / seconds / 1e12, "TFLOP/s")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


# ---- Time, memory and launches ----


def blocks(setup: Setup) -> Iterator[Case]:
    """One block of each stack, forward and backward, by each backend."""
    for kind, first, residues in setup.sizes.blocks:
        for backend in setup.present:
            yield Case(
                f"{kind} {first} x {residues}", backend, precision_name(HALF),
                partial(_block, setup, kind, first, residues, HALF, backend),
            )  # fmt: skip
    kind, first, residues = setup.sizes.blocks[0]
    for backend in setup.present:
        yield Case(
            f"{kind} {first} x {residues}", backend, precision_name(SINGLE),
            partial(_block, setup, kind, first, residues, SINGLE, backend),
        )  # fmt: skip


def _block(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype, backend: str) -> Iterator[Measured]:
    kernels, others = chosen(backend, setup.device, dtype)
    config = gpu_cases.config_of(setup.sizes)
    yield from others
    step = gpu_cases.block(config, kind, first, residues, setup.device, dtype, kernels)
    yield from measured(setup, step, replay=backend == "triton")


# ---- Where the time goes ----


def profile(setup: Setup) -> Iterator[Case]:
    """Each kernel of a block with our kernels: launches, time, and for our own the share of a copy's speed."""
    for kind, first, residues in setup.sizes.profiled:
        for backend in ("triton", "chunked"):
            if backend in setup.present:
                yield Case(
                    f"{kind} {first} x {residues}", backend, precision_name(HALF),
                    partial(_profile, setup, kind, first, residues, backend),
                )  # fmt: skip
                break


def _profile(setup: Setup, kind: str, first: int, residues: int, backend: str) -> Iterator[Measured]:
    kernels, _ = chosen(backend, setup.device, HALF)
    step = gpu_cases.block(gpu_cases.config_of(setup.sizes), kind, first, residues, setup.device, HALF, kernels)
    gpu_clock.drain(step)
    grids = gpu_operators.grids(step)
    ran = gpu_clock.kernels(step, setup.device)
    copy = setup.found("bandwidth")
    for stage, found in ran.items():
        yield from _shares(stage, found, grids[stage], copy)


def _shares(
    stage: str, ran: list[gpu_clock.Kernel], grids: list[gpu_operators.Launch], copy: float | None
) -> Iterator[Measured]:
    """Kernels of a stage by the sum of their times, the longest first. Own kernels are recognised by their order."""
    waiting = dict(enumerate(grids))
    own = {grid.kernel.split(".")[1] for grid in grids}
    seconds: dict[str, float] = defaultdict(float)
    moved: dict[str, int] = defaultdict(int)
    launches: Counter[str] = Counter()
    for kernel in ran:
        name = kernel.name
        if name in own:
            number = next((n for n, grid in waiting.items() if grid.kernel.split(".")[1] == name), None)
            if number is not None:
                grid = waiting.pop(number)
                name = grid.kernel
                moved[name] += grid.bytes_moved
        name = _short(name)
        seconds[name] += kernel.seconds
        launches[name] += 1
    total = sum(seconds.values())
    yield Measured(f"busy {stage}", 1e6 * total, "us", of="all")
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        words = [f"{launches[name]} launches", f"{seconds[name] / total:.1%}"]
        if moved[name]:
            rate = moved[name] / seconds[name] / 1e9
            words.append(f"{rate:.0f} GB/s" + (f", {rate / copy:.2f} of the copy's" if copy else ""))
        yield Measured(f"busy {stage}", 1e6 * seconds[name], "us", ", ".join(words), of=name)


def _short(name: str) -> str:
    """A kernel's name, without what C++ templates put around it."""
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return name[:100]


# ---- Operators against the roofline ----


def operators(setup: Setup) -> Iterator[Case]:
    """Each call of an operator in a block: time by each backend, the roofline, and the fraction of it that is reached."""
    for kind, first, residues in setup.sizes.operators:
        for number, call in enumerate(block_calls(setup, kind, first, residues, HALF), start=1):
            for backend in setup.present:
                if function := operators_of(backend).get(call.operator):
                    yield Case(
                        f"{kind} {first} x {residues}: {number} {call.name}", backend, precision_name(HALF),
                        partial(_operator, setup, call, function),
                    )  # fmt: skip


def _operator(setup: Setup, call: gpu_operators.Call, function: Operator) -> Iterator[Measured]:
    """On a GPU the time is that of the kernels, the shortest of three runs: an operator takes the host longer than the GPU."""
    bandwidth, peak = setup.found("bandwidth"), setup.found("products bf16")
    needed = gpu_operators.work(call)
    step = gpu_operators.run_of(call, function)
    taken = _kernel_seconds(setup, step)
    moved = gpu_operators.reported(call, function)
    for stage, least in needed.items():
        seconds = taken[stage]
        yield Measured(stage, 1e6 * seconds, "us")
        if bandwidth and peak:
            roofline = least.seconds(bandwidth * 1e9, peak * 1e12)
            yield Measured(f"roofline {stage}", 1e6 * roofline, "us", _limit(least, bandwidth * 1e9, peak * 1e12))
            yield Measured(f"fraction {stage}", roofline / seconds)
        if bandwidth and stage in moved:
            rate = moved[stage] / seconds / 1e9
            yield Measured(f"bandwidth {stage}", rate, "GB/s", f"{rate / bandwidth:.2f} of the copy's; bytes reported")


def _kernel_seconds(setup: Setup, step: Step) -> dict[str, float]:
    if setup.device.type != "cuda":
        return {stage: median(seconds) for stage, seconds in timed(setup, step).items()}
    gpu_clock.drain(step)
    runs = [gpu_clock.kernels(step, setup.device) for _ in range(3)]
    return {stage: min(sum(kernel.seconds for kernel in run[stage]) for run in runs) for stage in runs[0]}


def _limit(least: gpu_operators.Work, bandwidth: float, peak: float) -> str:
    return "by memory" if least.bytes / bandwidth > least.products / peak else "by matrix products"
