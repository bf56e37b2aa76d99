"""Time, memory and launches of a step on one device, stage by stage.

A step is a function that returns an iterator: it yields the name of each stage when it has launched the stage's work. So the
same program is timed, weighed and counted.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType

from .peak_memory import PeakMemory

MIB = 2**20
Step = Callable[[], Iterator[str]]

WARM_UP = 1
"""Runs before the first one that counts: kernels are compiled, memory is taken from the driver."""
_FLUSHED = 256 * MIB
"""Bytes that are written before each run, so that nothing is left in the GPU's cache: five times an H100's."""
_MOST_LEAD = 0.1
"""Longest lead in seconds: a step that takes the host longer fills the GPU's queue, and then a lead is of no use."""
_CYCLES = 2.0e9
"""Cycles a second of a GPU, about: only the length of a lead depends on it."""


def timed(step: Step, device: torch.device, seconds: float, most: int = 20) -> dict[str, list[float]]:
    """Seconds of each stage in up to `most` runs, after one that does not count: three at least, then until `seconds` are over.

    On a GPU it is the GPU's time (events). Before each run the GPU sleeps for as long as the host takes to launch the step, so
    that it does not wait for the host; a step that takes the host more than 0.1 s is timed as it is.
    """
    cuda = device.type == "cuda"
    flushed = torch.empty(_FLUSHED if cuda else 0, dtype=torch.uint8, device=device)
    for _ in range(WARM_UP):
        drain(step)
    host = host_seconds(step, device) if cuda else 0.0
    lead = int(1.2 * host * _CYCLES) if host < _MOST_LEAD else 0
    found: dict[str, list[float]] = {}
    start = time.perf_counter()
    for number in range(most):
        if number >= min(3, most) and time.perf_counter() - start > seconds:
            break
        flushed.zero_()
        if lead:
            torch.cuda._sleep(lead)
        marks = [("", _mark(cuda))]
        marks += [(stage, _mark(cuda)) for stage in step()]
        if cuda:
            torch.cuda.synchronize(device)
        for (_, before), (stage, after) in itertools.pairwise(marks):
            found.setdefault(stage, []).append(_between(before, after))
    return found


def drain(step: Step) -> None:
    """Run a step to its end."""
    for _stage in step():
        pass


def host_seconds(step: Step, device: torch.device) -> float:
    """Seconds that the host takes to launch a step, if the GPU's queue is not full."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    drain(step)
    took = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    return took


class Replayed:
    """The stages of a step as CUDA graphs, which the host launches as one: what the GPU alone takes.

    The step must read and write the same memory in every run, and must not wait for the GPU. Its results stay those of the
    tensors that it read when it was captured.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        """Captures; `step` has run before, so that kernels are compiled."""
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            drain(step)  # libraries take their workspaces of a stream in the first run
        torch.cuda.synchronize(device)
        gc.collect()
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        run = step()
        while True:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                stage = next(run, None)
            if stage is None:
                return
            self.graphs[stage] = graph

    def __call__(self) -> Iterator[str]:
        for stage, graph in self.graphs.items():
            graph.replay()
            yield stage


def _mark(cuda: bool) -> float | torch.cuda.Event:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        return before.elapsed_time(after) / 1000
    assert isinstance(after, float)
    return after - before


@dataclass(frozen=True)
class Memory:
    """Memory of one run, in MiB, above what there was before it."""

    peak: float
    after: dict[str, float]
    """What is still held when a stage ends: after a forward pass, what it keeps for the backward pass, and its results."""


def memory(step: Step, device: torch.device) -> Memory:
    """Memory of one run. On a CPU the tensors are counted, on a GPU torch's allocator is asked."""
    if device.type != "cuda":
        with PeakMemory() as count:
            after = _after(step, lambda: count.current)
        return Memory(count.peak / MIB, after)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    after = _after(step, lambda: torch.cuda.memory_allocated(device) - before)
    return Memory((torch.cuda.max_memory_allocated(device) - before) / MIB, after)


def _after(step: Step, held: Callable[[], int]) -> dict[str, float]:
    """MiB that are held when each stage ends."""
    found = {}
    for stage in step():
        found[stage] = held() / MIB
    return found


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the GPU."""

    name: str
    seconds: float

    @property
    def copies(self) -> bool:
        """Whether it is a copy or a fill that no program of the GPU does."""
        return self.name.startswith(("Memcpy", "Memset"))


def kernels(step: Step, device: torch.device) -> dict[str, list[Kernel]]:
    """What ran on the GPU in each stage, in order, as torch's profiler saw it. Without a GPU: nothing."""
    if device.type != "cuda":
        return {}
    found: dict[str, list[Kernel]] = {}
    run = step()
    while True:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            stage = next(run, None)
            torch.cuda.synchronize(device)
        if stage is None:
            return found
        events = sorted(profiler.events() or (), key=lambda event: event.time_range.start)
        found[stage] = [
            Kernel(event.name, event.time_range.elapsed_us() / 1e6)
            for event in events
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
