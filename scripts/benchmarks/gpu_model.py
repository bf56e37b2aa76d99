"""The whole model on a GPU: training steps, predictions, and the longest protein."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from evodsp.inference.config import PassSettings
from evodsp.inference.seeds import PassRunner, run_passes
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.recordings import CudaRecorder
from evodsp.training.logs import pass_flops, training_flops

from . import gpu_cases, gpu_clock
from .gpu_cases import Inputs
from .gpu_clock import MIB, Step
from .gpu_rows import HALF, Case, Measured, Setup, chosen, cleaned, out_of_memory, precision_name

# ---- The whole model ----


def whole_model(setup: Setup) -> Iterator[Case]:
    """Training steps and predictions of the presets' full depth."""
    sizes = setup.sizes
    backends = [backend for backend in setup.present if backend in ("triton", "chunked")][:1]
    for backend in backends:
        for inputs in sizes.training:
            name = f"training step, {inputs}, CUDA graphs"
            yield Case(name, backend, precision_name(HALF), partial(_step, setup, inputs, backend))
        for inputs in sizes.inference:
            yield Case(
                f"prediction, {inputs}", backend, precision_name(HALF), partial(_prediction, setup, inputs, backend)
            )


def _step(setup: Setup, inputs: Inputs, backend: str) -> Iterator[Measured]:
    """A step of one pass and one of all passes: time, memory, what the GPU is busy for, and the share of the peak that the
    model's own products reach. Training draws the number of passes evenly, so its mean step is their mean.
    """
    device, cuda = setup.device, setup.device.type == "cuda"
    kernels, others = chosen(backend, device, HALF)
    yield from others
    config = gpu_cases.config_of(setup.sizes, inputs)
    model = gpu_cases.model(config, kernels, device)
    if cuda:
        use_graphs(model, Graphs(CudaRecorder()))
    steps = [
        gpu_cases.training(model, dataclasses.replace(inputs, passes=passes), device, HALF)
        for passes in sorted({inputs.passes, 1}, reverse=True)
    ]
    begin = time.perf_counter()
    for _ in range(3):  # kernels are compiled, Adam makes its state; stacks are recorded in the second step
        gpu_clock.drain(steps[0])
    if cuda:
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        yield Measured("peak memory", most[0] / MIB, "MiB", "parameters and Adam included")
        yield Measured("reserved memory", most[1] / MIB, "MiB", "of the allocator")
    yield Measured("first three steps", time.perf_counter() - begin, "s", "kernels are compiled, stacks recorded")
    flops = pass_flops(config, gpu_cases.labelled(inputs))
    means = []
    for step, passes in zip(steps, sorted({inputs.passes, 1}, reverse=True), strict=True):
        of = f"{passes} pass{'es' * (passes > 1)}"
        times = gpu_clock.timed(step, device, 0.0, min(3, setup.sizes.runs))
        whole = [sum(stages) for stages in zip(*times.values(), strict=True)]
        for stage, seconds in times.items():
            yield Measured(stage, 1000 * median(seconds), "ms", of=of)
        spread = f"{1000 * min(whole):.4g} to {1000 * max(whole):.4g} in {len(whole)} runs"
        yield Measured("step", 1000 * median(whole), "ms", spread, of)
        for stage, ran in gpu_clock.kernels(step, device).items():
            yield Measured(f"busy {stage}", 1000 * sum(k.seconds for k in ran), "ms", f"{len(ran)} launches", of)
        if peak := setup.found("products bf16"):
            share = training_flops(flops, passes) / median(whole) / 1e12 / peak
            yield Measured("share of the peak", share, "", "of the measured speed of bf16 products", of)
        means.append(median(whole))
    yield Measured("mean step", 500 * (means[0] + means[-1]), "ms", f"over 1 to {inputs.passes} passes")


def _prediction(setup: Setup, inputs: Inputs, backend: str) -> Iterator[Measured]:
    """Time and memory of a prediction as `evodsp predict --precision bf16` makes it, from features to coordinates, both on the
    host; the second of two."""
    device = setup.device
    kernels, others = chosen(backend, device, HALF, gradients=False)
    yield from others
    model = gpu_cases.model(gpu_cases.config_of(setup.sizes, inputs), kernels, device).eval()
    settings = PassSettings("bf16")
    runner = PassRunner(model, settings)
    batch = runner.sized(gpu_cases.features_of(inputs))
    for name in ("first", "prediction"):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        output, passes = run_passes(runner, batch, lambda _: None)
        output.structure.positions.cpu()
        yield Measured(name, time.perf_counter() - begin, "s", "kernels are compiled" if name == "first" else "")
        del output
    yield Measured("each pass", median(passes), "s")
    if device.type == "cuda":
        yield Measured("peak memory", torch.cuda.max_memory_allocated(device) / MIB, "MiB", "parameters included")


# ---- The longest protein ----


def longest(setup: Setup) -> Iterator[Case]:
    """The largest R whose pass of inference, and whose training step, fits the device's memory; with the default kernels."""
    sizes = setup.sizes
    for name, inputs, make in (
        ("inference", sizes.inference[0], gpu_cases.inference),
        ("training step", sizes.training[0], gpu_cases.training),
    ):
        rows = f"{name}, {inputs.sequences} + {inputs.extra} sequences, {inputs.templates} templates"
        yield Case(rows, "auto", precision_name(HALF), partial(_longest, setup, make, inputs))


MakeStep = Callable[[gpu_cases.AlphaFold, Inputs, torch.device, torch.dtype], Step]


def _longest(setup: Setup, make: MakeStep, inputs: Inputs) -> Iterator[Measured]:
    kernels, _ = chosen("auto", setup.device, HALF, make is gpu_cases.training)
    model = gpu_cases.model(gpu_cases.config_of(setup.sizes, inputs), kernels, setup.device)
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
