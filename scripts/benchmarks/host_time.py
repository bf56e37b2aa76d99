"""Time that the host needs to launch our own operators and a whole block, and where it goes. Needs no GPU.

    python -m scripts.benchmarks.host_time [--output scripts/benchmarks/results/host_time.txt]
    python -m scripts.benchmarks.host_time --device cuda [--seconds 18]

Without a GPU tensors are on the CPU and tiny: a block on 4 x 4 positions with the widths of the preset `test`, in bf16. Triton
has a driver without a GPU: it compiles kernels for an H100 and launches nothing. So what is measured is Python, torch and
Triton, without the driver's part of a launch (2 to 3 us on a GPU). One line an operator of a block, in microseconds of the
processor, the fastest of several rounds:

    grids      how many it launches
    call       as the model calls it, without gradients
    library    the same through torch's dispatcher, as compiled programs call it
    graph      as the model calls it, when a gradient is wanted of its first tensor ("-": it has none)
    body       allocating results and describing the grids
    launches   launching these grids in Triton's ordinary way

Then the whole block, forward and backward. "own" is the sum of its calls of own operators, by the column `call`. The remainder
is Python and torch's operators; on the CPU these compute too, so it is more than the host of a GPU needs.

With `--device cuda` blocks of the preset's widths on 4 x 16 positions are really launched. Times are those until a call
returns, while the GPU has less queued than it takes. Then each operator's results are compared, bit by bit, with those of its
body and Triton's ordinary launches: on aligned tensors, on tensors that begin one element later, in both orders, at sizes that
are multiples of 16 and at others. The exit code is 1 if any differs. What has not begun after `--seconds` is left out. And
`--compile` compiles the same kernels without a GPU, into Triton's cache (TRITON_CACHE_DIR), which saves most of the time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.kernels import triton as own
from evodsp.model.kernels.operators import Kernels
from evodsp.model.kernels.triton_kernels import launch

from . import gpu_cases
from .gpu_clock import Step

BLOCKS = (("evoformer", 4, 4), ("extra", 4, 4))
"""Kind and two sizes."""
ON_GPU = (("evoformer", 4, 16), ("extra", 4, 16))
COMPARED = (*ON_GPU, ("evoformer", 5, 7), ("extra", 5, 7))
CALLS, ROUNDS = 60, 7


class NoBinaries:
    """What Triton asks of a driver's library."""

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads of a program at most."""
        return 0, 0, 32, 0, 1024

    def unload_module(self, *_: Any) -> None:
        """Does nothing, because nothing was loaded."""

    def get_device_properties(self, _: int) -> dict[str, int]:
        """The properties of an H100."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class NoLauncher:
    """Launches nothing."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass


class NoGpu:
    """A driver for Triton that compiles for an H100 and launches nothing."""

    def __init__(self, launcher: Callable[[Any, Any], Callable[..., None]] = NoLauncher) -> None:
        self.launcher_cls, self.utils = launcher, NoBinaries()

    def get_current_device(self) -> int:
        """The number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> Any:
        """An H100."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Call:
    """One of a block's different calls of own operators."""

    operator: launch.Operator
    arguments: tuple[Any, ...]
    stage: str
    times: int
    """How often the block calls it so."""


class _Catch(TorchDispatchMode):
    """Keeps the different calls of own operators, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = ""
        self.found: dict[Any, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "evodsp":
            shapes = ((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args)
            found = self.found.setdefault((self.stage, func, *shapes), [args, 0])
            found[1] += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: Step) -> list[Call]:
    """The different calls of own operators in a step, in order."""
    by_name = own.LAUNCHED
    with _Catch() as catch:
        for catch.stage in _named(step):
            pass
    return [Call(by_name[func.name()], args, stage, times) for (stage, func, *_), (args, times) in catch.found.items()]


def _named(step: Step) -> Iterator[str]:
    """The name of each stage before it begins."""
    run = step()
    for stage in ("forward", "backward"):
        yield stage
        if next(run) != stage:
            raise ValueError(f"a step whose stages are not forward and backward: {stage}")


@dataclass
class Clock:
    """Measures microseconds of a call."""

    device: torch.device

    def __call__(self, function: Callable[[], object], calls: int = CALLS) -> float:
        """The mean of some calls, in the fastest of some rounds."""
        now = time.perf_counter if self.device.type == "cuda" else time.process_time
        for _ in range(3):
            function()
        best = float("inf")
        for _ in range(ROUNDS):
            self.wait()
            begin = now()
            for _ in range(calls):
                function()
            best = min(best, now() - begin)
        return 1e6 * best / calls

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def operator_line(call: Call, clock: Clock) -> tuple[float, str]:
    """Microseconds as the model calls it, and the whole line."""
    operator, arguments = call.operator, call.arguments
    grids: list[launch.Launch] = []
    operator.body(grids.append, *arguments)
    grids = [grid for grid in grids if grid.programs]
    overload = getattr(torch.ops.evodsp, operator.name.removeprefix("evodsp::")).default
    with torch.no_grad():
        found = [
            clock(lambda: operator(*arguments)),
            clock(lambda: overload(*arguments)),
            _with_graph(operator, arguments, clock),
            clock(lambda: operator.body(lambda _: None, *arguments)),
            clock(lambda: [launch.run(grid) for grid in grids]),
        ]
    name = f"{operator.name.removeprefix('evodsp::')} {'x'.join(map(str, arguments[0].shape))}"
    numbers = " ".join(f"{'-' if x is None else format(x, '.1f'):>9}" for x in found)
    return found[0] or 0.0, f"{name:52} {call.stage:8} {call.times:6} {len(grids):6} {numbers}"


def _with_graph(operator: launch.Operator, arguments: Sequence[Any], clock: Clock) -> float | None:
    if not operator.differentiable:
        return None
    first = arguments[0].detach().requires_grad_()
    with torch.enable_grad():
        return clock(lambda: operator(first, *arguments[1:]))


def block_of(sizes: gpu_cases.Sizes, kind: str, first: int, residues: int, device: torch.device) -> Step:
    """A block with our own operators, in bf16."""
    config, kernels = gpu_cases.config_of(sizes), Kernels.of(own)
    return gpu_cases.block(config, kind, first, residues, device, torch.bfloat16, kernels)


def block_lines(name: str, step: Step, clock: Clock) -> Iterator[str]:
    """Lines of a block's operators, then of the whole block."""
    sums = {"forward": [0.0, 0, 0], "backward": [0.0, 0, 0]}
    yield f"\n{name}"
    yield f"{'':52} {'stage':8} {'calls':>6} {'grids':>6} " + " ".join(
        f"{x:>9}" for x in ("call", "library", "graph", "body", "launches")
    )
    for call in calls_of(step):
        microseconds, line = operator_line(call, clock)
        sums[call.stage][0] += call.times * microseconds
        sums[call.stage][1] += call.times
        sums[call.stage][2] += call.times * len(call.operator.launches(*call.arguments))
        yield line
    for stage, microseconds in _stages(step, clock).items():
        mine, calls, grids = sums[stage]
        yield (
            f"whole block, {stage}: {microseconds / 1000:.2f} ms; own {mine / 1000:.2f} ms: "
            f"{calls} calls, {grids} grids, {mine / max(1, grids):.1f} us a grid"
        )


def _stages(step: Step, clock: Clock) -> dict[str, float]:
    """Microseconds of each stage, the fastest of some runs."""
    now = time.perf_counter if clock.device.type == "cuda" else time.process_time
    best: dict[str, float] = {}
    for _ in range(10):
        clock.wait()
        begin = now()
        for stage in step():
            end = now()
            clock.wait()
            best[stage] = min(best.get(stage, float("inf")), 1e6 * (end - begin))
            begin = now()
    return best


def shifted(arguments: Sequence[Any], elements: int) -> list[Any]:
    """Copies of all tensors that begin a number of elements after an aligned address."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        reach = (
            sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        )
        return x.new_empty(elements + reach).as_strided(x.shape, x.stride(), elements).copy_(x)

    return [copy(x) for x in arguments]


def differing(call: Call) -> list[str]:
    """The ways of calling an operator whose results are not those of its body and Triton's ordinary launches."""
    operator, found = call.operator, []
    for order in ((0, 1), (1, 0)):
        operator.forget()
        for elements in order:
            arguments = shifted(call.arguments, elements)
            expected = _bytes(operator.body(launch.run, *arguments))
            for number in range(4):  # Triton's launch, the one that is written down, two that are repeated
                if _bytes(operator(*arguments)) != expected:
                    found.append(
                        f"call {number} of tensors {elements} elements after an aligned address, order {order}"
                    )
    return found


def _bytes(results: Tensor | Sequence[Tensor]) -> list[bytes]:
    tensors = [results] if isinstance(results, Tensor) else results
    return [x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for x in tensors]


def comparison_lines(device: torch.device, end: float) -> Iterator[str]:
    """Compare the operators of some blocks until the time `end`. The last line counts."""
    failed = compared = left = 0
    for kind, first, residues in COMPARED:
        if time.monotonic() > end:
            left += 1
            continue
        seen: set[Any] = set()
        for call in calls_of(block_of(gpu_cases.FULL, kind, first, residues, device)):
            if time.monotonic() > end:
                left += 1
                continue
            given = (call.operator, *(type(x) for x in call.arguments))
            if given in seen:
                continue
            seen.add(given)
            for way in differing(call):
                failed += 1
                yield f"DIFFERS: {call.operator.name} of a {kind} block on {first} x {residues}: {way}"
            compared += 1
    refused = [name for name, operator in own.LAUNCHED.items() if operator.refused]
    if refused:
        failed += 1
        yield f"REFUSED: Triton is not as expected, so plans are not repeated: {', '.join(refused)}"
    yield f"compared bit by bit: {compared} calls, {failed} failures; {left} blocks or calls left out for want of time"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write it where asked. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Where the host's time goes when our own operators are called.")
    parser.add_argument("--output", type=Path, help="write the table into this file too")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: launch really, and compare")
    parser.add_argument("--seconds", type=float, default=18.0, help="of --device cuda: begin nothing after them")
    parser.add_argument(
        "--compile", action="store_true", help="only compile, without a GPU, what --device cuda launches"
    )
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    gpu = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if not gpu:
        from triton.runtime import driver

        driver.set_active(NoGpu())
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    if options.compile:
        for _ in comparison_lines(device, float("inf")):
            pass  # without a GPU nothing fills the results
        return 0
    say(
        f"# python -m scripts.benchmarks.host_time (triton {importlib.metadata.version('triton')}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.cuda.get_device_name() + ', ' if gpu else ''}{_processor()})"
    )
    for kind, first, residues in ON_GPU if gpu else BLOCKS:
        if time.monotonic() > end and gpu:
            say(f"{kind} block on {first} x {residues} left out for want of time")
            continue
        step = block_of(gpu_cases.FULL if gpu else gpu_cases.TINY, kind, first, residues, device)
        for line in block_lines(f"{kind} block on {first} x {residues}", step, Clock(device)):
            say(line)
    if gpu:
        for line in comparison_lines(device, end):
            say(line)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(gpu and " 0 failures" not in lines[-1])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
