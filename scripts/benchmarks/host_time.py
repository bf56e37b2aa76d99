"""Milliseconds that the host needs to launch a whole block, and whether operators whose launches are repeated are right.

    python -m scripts.benchmarks.host_time                        needs no GPU: a driver of Triton that launches nothing
    python -m scripts.benchmarks.host_time --device cuda [--seconds 18]

Without a GPU tensors are on the CPU and tiny: a block on 4 x 4 positions with the widths of the preset `test`, in bf16. Triton
compiles kernels for an H100. So what is measured is Python, torch and Triton, without the driver's part of a launch (2 to 3 us
on a GPU); torch's operators compute on the CPU too, so it is more than the host of a GPU needs.

With `--device cuda` blocks of the preset's widths on 4 x 16 positions are really launched. Times are those until a call
returns, while the GPU has less queued than it takes. Then each operator's results are compared, bit by bit, with those of its
body and Triton's ordinary launches: on aligned tensors, on tensors that begin one element later, in both orders, at sizes that
are multiples of 16 and at others. The exit code is 1 if any differs. What has not begun after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.kernels import triton as own
from evodsp.model.kernels.operators import Kernels
from evodsp.model.kernels.triton_kernels import launch

from . import gpu_cases
from .gpu_clock import Step, drain

BLOCKS = (("evoformer", 4, 4), ("extra", 4, 4))
"""Kind and two sizes."""
ON_GPU = (("evoformer", 4, 16), ("extra", 4, 16))
COMPARED = (*ON_GPU, ("evoformer", 5, 7), ("extra", 5, 7))


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


class Calls(TorchDispatchMode):
    """Keeps the different calls of own operators: operator and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[launch.Operator, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "evodsp":
            self.found.setdefault((func, *map(type, args)), (own.LAUNCHED[func.name()], args))
        return func(*args, **(kwargs or {}))


def block_of(sizes: gpu_cases.Sizes, kind: str, first: int, residues: int, device: torch.device) -> Step:
    """A block with our own operators, in bf16."""
    config, kernels = gpu_cases.config_of(sizes), Kernels.of(own)
    return gpu_cases.block(config, kind, first, residues, device, torch.bfloat16, kernels)


def stages(step: Step, device: torch.device) -> dict[str, float]:
    """Milliseconds of each stage, the fastest of some runs."""
    cuda = device.type == "cuda"
    now = time.perf_counter if cuda else time.process_time
    best: dict[str, float] = {}
    for _ in range(10):
        begin = now()
        for stage in step():
            end = now()
            if cuda:
                torch.cuda.synchronize(device)
            best[stage] = min(best.get(stage, float("inf")), 1e3 * (end - begin))
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


def differing(operator: launch.Operator, given: Sequence[Any]) -> list[str]:
    """The ways of calling an operator whose results are not those of its body and Triton's ordinary launches."""
    found = []
    for order in ((0, 1), (1, 0)):
        operator.forget()
        for elements in order:
            arguments = shifted(given, elements)
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
        with Calls() as calls:
            if time.monotonic() < end:
                drain(block_of(gpu_cases.FULL, kind, first, residues, device))
        left += not calls.found
        for operator, arguments in calls.found.values():
            if time.monotonic() > end:
                left += 1
                continue
            for way in differing(operator, arguments):
                failed += 1
                yield f"DIFFERS: {operator.name} of a {kind} block on {first} x {residues}: {way}"
            compared += 1
    refused = [name for name, operator in own.LAUNCHED.items() if operator.refused]
    if refused:
        failed += 1
        yield f"REFUSED: Triton is not as expected, so plans are not repeated: {', '.join(refused)}"
    yield f"compared bit by bit: {compared} calls, {failed} failures; {left} blocks or calls left out for want of time"


def lines(gpu: bool, seconds: float) -> Iterator[str]:
    """What is printed."""
    end, triton = time.monotonic() + seconds, importlib.metadata.version("triton")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    name = torch.cuda.get_device_name() if gpu else platform.machine()
    yield f"# python -m scripts.benchmarks.host_time (triton {triton}, torch {torch.__version__}, {name})"
    for kind, first, residues in ON_GPU if gpu else BLOCKS:
        step = block_of(gpu_cases.FULL if gpu else gpu_cases.TINY, kind, first, residues, device)
        for stage, milliseconds in stages(step, device).items():
            yield f"{kind} block on {first} x {residues}, {stage}: {milliseconds:.2f} ms"
    if gpu:
        yield from comparison_lines(device, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Milliseconds that the host needs to launch a block.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: launch really, and compare")
    parser.add_argument("--seconds", type=float, default=18.0, help="of --device cuda: begin nothing after them")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gpu, line = options.device == "cuda", ""
    if not gpu:
        from triton.runtime import driver

        driver.set_active(NoGpu())
    for line in lines(gpu, options.seconds):
        print(line, flush=True)
    return int(gpu and " 0 failures" not in line)


if __name__ == "__main__":
    sys.exit(main())
