"""This machine as a device of the planner: its memory that is free, and what its processor does in a second.

The memory is what Linux and the control group of the process (a container, a batch job) leave. The rates are measured in a
tenth of a second, on a machine that may be busy: times that follow from them are rough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from evodsp.planner.device import Device

_EDGE, _COPIED = 768, 1 << 24
"""Edge of the square matrices that are multiplied, and the numbers that are copied."""


@cache
def this_cpu() -> Device:
    """The processor of this machine, with as many threads as torch uses."""
    single, half = _products(torch.float32), _products(torch.bfloat16)
    x = torch.zeros(_COPIED)
    y = torch.empty_like(x)
    copying = _seconds(lambda: y.copy_(x))
    return Device(
        name="this CPU",
        memory_gib=free_memory() / 2**30,
        reserved_gib=0.0,
        fragmentation=0.0,
        tflops_half=half,
        tflops_single=single,
        tflops_tf32=single,
        memory_gbps=2 * x.nbytes / copying / 1e9,
        # Assumed: what AlphaFold2's layers reach of the large product and the copy that are timed.
        products_efficiency=0.8,
        attention_efficiency=0.4,
        memory_efficiency=0.3,
        kernel_us=5.0,
        launch_us=0.0,
        gpus_per_node=1,
        inside="pcie",
        across="infiniband",
        overlaps=False,
        on_gpu=False,
    )


def free_memory() -> int:
    """Bytes that programs of this machine can still take."""
    information = Path("/proc/meminfo")
    if not information.is_file():  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":", 1) for line in information.read_text().splitlines())
    return min([int(lines["MemAvailable"].split()[0]) << 10, *_left_in_control_group()])


def _left_in_control_group(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that the control group leaves; empty without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (root / limit).is_file() and (root / used).is_file():
            most = (root / limit).read_text().strip()
            return [max(0, int(most) - int((root / used).read_text()))] if most.isdecimal() else []
    return []


def _products(dtype: torch.dtype) -> float:
    """TFLOP/s of a matrix product."""
    x = torch.ones(_EDGE, _EDGE, dtype=dtype)
    return 2 * _EDGE**3 / _seconds(lambda: x @ x) / 1e12


def _seconds(run: Callable[[], object]) -> float:
    """The shortest of three times, after a first call that is not counted."""
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times[1:])
