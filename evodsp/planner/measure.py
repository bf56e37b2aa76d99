"""`evodsp plan --measure`: what this machine does, as a file of its device and one of the link between its devices.

On a GPU it times matrix products in each precision, copies, attention, the host's part of an operator, and the collectives
among all GPUs of this machine (NCCL); on a CPU the same of one thread and of two processes. What single operators cannot tell
correct an Evoformer block of full width (on a GPU two: one of small kernels, one of large ones), and one of small widths, whose
time is all overhead. A block on all devices at once tells how much they slow each other down. It takes a minute.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml  # type: ignore[import-untyped]
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.files import write_text
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.kernels import triton
from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import float32_matmul
from evodsp.model.primitives import use_kernels
from evodsp.parallel.group import Group, Kind, init_mesh
from evodsp.planner.device import Device
from evodsp.planner.trace import Operation, ProgramRecorder
from evodsp.printing import counted

REPEATS, SWEEP_REPEATS = 15, 60
_CYCLES = 2.0e9
"""Cycles a second of a GPU, about: only the length of a lead depends on it."""
_CHAIN = 10
"""Collectives that are timed together on a GPU."""
WIRE_BYTES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of what a rank sends in the sweep of collectives."""


def seconds(run: Callable[[], object], on_gpu: bool, repeats: int = REPEATS) -> float:
    """Median time of `run`, after a first call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def gpu_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time that the GPU alone takes for `run`: it sleeps until the host, which may be slower, has launched all of it."""
    run()
    launching = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        launching.append(time.perf_counter() - begun)
    lead = int(1.2 * max(launching) * _CYCLES)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(lead)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def tflops(dtype: torch.dtype, on_gpu: bool, tf32: bool = False) -> float:
    """TFLOP/s of a large product."""
    n, where = (8192, "cuda") if on_gpu else (1024, "cpu")
    a, b = (torch.randn(n, n, device=where).to(dtype) for _ in range(2))
    with float32_matmul("high" if tf32 else "highest"):
        return 2 * n**3 / seconds(lambda: a @ b, on_gpu) / 1e12


def memory_gbps(on_gpu: bool) -> float:
    """GB/s, read and written, of a copy that no cache holds."""
    x = torch.rand(1 << (28 if on_gpu else 25), device="cuda" if on_gpu else "cpu")
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / seconds(lambda: y.copy_(x), on_gpu) / 1e9


def operator_us(on_gpu: bool) -> float:
    """The host's time for an operator that does next to nothing."""
    x = torch.zeros(8, device="cuda" if on_gpu else "cpu")

    def many() -> None:
        for _ in range(1000):
            x.add(x)

    return seconds(many, on_gpu, 5) * 1e3


def own_launch_us() -> float:
    """The host's time for a launch of an own kernel."""
    x = torch.zeros(1, 16, 16, 128, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(128, device="cuda")

    def many() -> None:
        for _ in range(1000):
            triton.layer_norm(x, scale, scale)

    return seconds(many, True, 5) * 1e3


class MeasuredBlock:
    """The forward and backward pass of one Evoformer block."""

    def __init__(self, config: EvoformerConfig, c_m: int, c_z: int, rows: int, residues: int) -> None:
        self.config, self.c_m, self.c_z, self.rows, self.residues = config, c_m, c_z, rows, residues

    def stack(self, dtype: torch.dtype, own_kernels: bool) -> EvoformerStack:
        """The block without numbers."""
        with torch.device("meta"):
            stack = EvoformerStack(self.c_m, self.c_z, dataclasses.replace(self.config, blocks=1, checkpoint=False))
        if own_kernels:
            use_kernels(stack, Kernels.of(triton))
        return stack.to(dtype)

    def run(self, stack: EvoformerStack) -> Callable[[], None]:
        """A call of both passes, on the device of the stack."""
        first = next(stack.parameters())
        sizes = {"dtype": first.dtype, "device": first.device}
        # Numbers and not zeros, on which a GPU is faster.
        m = torch.randn(1, self.rows, self.residues, self.c_m, **sizes, requires_grad=True)  # type: ignore[call-overload]
        z = torch.randn(1, self.residues, self.residues, self.c_z, **sizes, requires_grad=True)  # type: ignore[call-overload]
        masks = (torch.ones(1, rows, self.residues, device=first.device) for rows in (self.rows, self.residues))
        msa_mask, pair_mask = masks

        def both() -> None:
            outputs = stack(m.view_as(m), z.view_as(z), msa_mask, pair_mask)
            torch.autograd.backward(list(outputs), [torch.ones_like(x) for x in outputs])

        return both

    def on_device(self, dtype: torch.dtype, on_gpu: bool) -> Callable[[], None]:
        """A call of both passes with numbers."""
        stack = self.stack(dtype, on_gpu).to_empty(device="cuda" if on_gpu else "cpu")
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        return self.run(stack)

    def work(self, dtype: torch.dtype, on_gpu: bool) -> list[Operation]:
        """The operators of both passes."""
        recorder, stack = ProgramRecorder(), self.stack(dtype, on_gpu)
        with torch.device("meta") if on_gpu else FakeTensorMode(allow_non_fake_inputs=True):
            run = self.run(stack if on_gpu else stack.to_empty(device="cpu"))
            with recorder:
                run()
        return [event for event in recorder.events if isinstance(event, Operation)]


SMALL = MeasuredBlock(ModelConfig.preset("small").evoformer, 64, 32, 8, 16)
FULL = {
    True: (MeasuredBlock(EvoformerConfig(), 256, 128, 128, 256), MeasuredBlock(EvoformerConfig(), 256, 128, 512, 384)),
    False: (MeasuredBlock(EvoformerConfig(), 256, 128, 32, 64),),
}
"""By whether the device is a GPU. Most kernels of the last block are large; those of a GPU's other block are small."""


def precision(on_gpu: bool) -> torch.dtype:
    """The precision in which blocks are measured."""
    return torch.bfloat16 if on_gpu else torch.float32


def attention_tlogits(rows: int, residues: int, heads: int, width: int) -> float:
    """10^12 logits a second of the GPU kernels' attention with a pair bias, forward, in bf16, at a size that fills a GPU."""
    projected = torch.randn(1, rows, residues, 4, heads, width, device="cuda", dtype=torch.bfloat16)
    keys = torch.ones(1, rows, residues, device="cuda")
    bias = torch.randn(1, heads, residues, residues, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        taken = gpu_seconds(lambda: triton.biased_attention(projected, keys, bias))
    return rows * heads * residues**2 / taken / 1e12


def corrected(device: Device) -> Device:
    """The device with the times of an operator, and the shares of the peaks, that explain the blocks."""
    dtype, on_gpu = precision(device.on_gpu), device.on_gpu
    small_s, work = seconds(SMALL.on_device(dtype, on_gpu), on_gpu), SMALL.work(dtype, on_gpu)
    if on_gpu:
        own_us = own_launch_us()
        own = [one for one in work if one.name.startswith("evodsp::")]
        others_us = small_s * 1e6 - own_us * sum(one.launches for one in own)
        device = dataclasses.replace(
            device,
            own_us=own_us,
            launch_us=max(own_us, others_us / (len(work) - len(own))),
            kernel_us=gpu_seconds(SMALL.on_device(dtype, True)) / sum(one.launches for one in work) * 1e6,
            attention_tlogits=attention_tlogits(256, 384, 8, 32),
        )
    else:
        device = dataclasses.replace(device, kernel_us=small_s / len(work) * 1e6)
    time_of = gpu_seconds if on_gpu else (lambda run: seconds(run, False))
    timed = [(block.work(dtype, on_gpu), time_of(block.on_device(dtype, on_gpu))) for block in FULL[on_gpu]]
    return with_shares(device, *timed)


Timed = tuple[list[Operation], float]
"""The operators of a block, and the seconds that they took together."""


def with_shares(device: Device, *blocks: Timed) -> Device:
    """The device with the shares that explain the last block and, if there are two, with the part of them that small kernels
    reach, which explains the first."""

    def reached(share: float) -> Device:
        return dataclasses.replace(
            device, products_efficiency=share, memory_efficiency=share, attention_efficiency=share
        )

    def of_small(part: float) -> Device:
        return dataclasses.replace(device, small_efficiency=part)

    for _ in range(5):  # each block has a few kernels of the other kind
        device = _fitted(reached, *blocks[-1])
        if len(blocks) > 1:
            device = _fitted(of_small, *blocks[0])
    return device


def _fitted(device_of: Callable[[float], Device], work: list[Operation], taken: float) -> Device:
    """The device with which the operators take so many seconds."""
    low, high = 0.02, 2.0
    for _ in range(30):  # the time falls with the share
        middle = round((low + high) / 2, 4)
        device = device_of(middle)
        total = sum(map(device.seconds, work))
        low, high = (middle, high) if total > taken else (low, middle)
    return device


def collectives(group: Group, x: Tensor, y: Tensor) -> dict[Kind, Callable[[], None]]:
    """Calls of collectives that send x, or a part of it, and receive y, or a part of it."""
    each = x.numel() // group.size
    counts, mine, received = [each] * group.size, x[:each], y[:each]
    begun: dict[Kind, Callable[[], Any]] = {
        "all-to-all": lambda: group.all_to_all(y, x, counts, counts),
        "all-gather": lambda: group.all_gather(y, mine),
        "reduce-scatter": lambda: group.reduce_scatter(received, x),
        "all-reduce": lambda: group.all_reduce(x),
        "broadcast": lambda: group.broadcast(x, 0),
        "reduce": lambda: group.reduce(x, 0),
    }

    def whole(begin: Callable[[], Any]) -> Callable[[], None]:
        return lambda: begin().wait()

    return {kind: whole(begin) for kind, begin in begun.items()}


def timed_collectives(
    group: Group, on_gpu: bool, sizes: Sequence[int] = WIRE_BYTES
) -> Iterator[tuple[Kind, float, float]]:
    """Every collective at every size, of bytes that a rank sends: its kind, its bytes on the wire and its seconds. All ranks of
    the default process group call this together, each with its own group."""
    where = "cuda" if on_gpu else "cpu"
    factor = torch.randn(256, 256, device=where)

    def work() -> Tensor:
        return factor @ factor

    for size in sizes:
        small = size <= WIRE_BYTES[-1]
        numbers = size // 4 // group.size * group.size
        x, y = torch.zeros(numbers, device=where), torch.zeros(numbers, device=where)

        def taken(run: Callable[[], object], small: bool = small) -> float:
            if not on_gpu:
                return seconds(run, False, SWEEP_REPEATS if small else REPEATS)
            # Ranks begin apart by some of the host's time; a chain of calls divides that among them.
            return gpu_seconds(lambda: [run() for _ in range(_CHAIN)]) / _CHAIN if small else gpu_seconds(run, 5)

        for kind, call in collectives(group, x, y).items():
            on_wire = 4 * numbers * (group.size - 1) / group.size * (2 if kind == "all-reduce" else 1)

            def both(call: Callable[[], None] = call) -> None:
                work()
                call()

            # Between products, as in a model: a rank that computes notices late that something has arrived.
            dist.barrier()
            alone_s = taken(work)
            dist.barrier()
            both_s = taken(both)
            yield kind, on_wire, max(both_s - alone_s, 0.1 * both_s)


def sweep(rank: int, ranks: int, store: str, on_gpu: bool, results: Any) -> None:
    """Time every collective at every size, on one rank of `ranks`, and find `Device.crowding`."""
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, on_wire, taken in timed_collectives(init_mesh(ranks).sequence_group(), on_gpu):
        found.setdefault(kind, []).append((on_wire, taken))
    crowding = crowded_block(rank, on_gpu)
    if rank == 0:
        results.put((found, crowding))
    dist.barrier()
    dist.destroy_process_group()


def crowded_block(rank: int, on_gpu: bool) -> float:
    """Slowdown of a block when all ranks compute one, against the first rank alone."""
    run = FULL[on_gpu][0].on_device(precision(on_gpu), on_gpu)
    alone, together = [], []
    for _ in range(REPEATS):  # by turns, so that another program on this machine slows down both
        dist.barrier()
        if rank == 0:
            alone.append(seconds(run, on_gpu, 1))
        dist.barrier()
        together.append(seconds(run, on_gpu, 1))
    return max(1.0, statistics.median(together) / statistics.median(alone)) if rank == 0 else 1.0


def link_of(name: str, found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """The link file's content, from (bytes on the wire, seconds) of each kind."""
    starts = {kind: round(times[0][1] * 1e6, 1) for kind, times in found.items()}
    starts |= {kind: starts["broadcast"] for kind in get_args(Kind) if kind not in starts}

    def gbps(kind: str) -> list[float]:
        return [moved / max(t - starts[kind] * 1e-6, 0.1 * t) / 1e9 for moved, t in found[kind][1:]]

    gathered = gbps("all-gather")
    sizes = [moved for moved, _ in found["all-gather"][1:]]
    share = min(1.0, statistics.median(a / g for a, g in zip(gbps("all-to-all"), gathered, strict=True)))
    return {
        "name": name,
        "start_us": starts,
        "bandwidth": [[float(size), round(rate, 3)] for size, rate in zip(sizes, gathered, strict=True)],
        "all_to_all_share": round(share, 3),
    }


def measured_device(on_gpu: bool, ranks: int) -> Device:
    """The device as single operators show it; its link is not known yet."""
    cores = counted(os.cpu_count() or 1, "core")
    name = torch.cuda.get_device_name() if on_gpu else f"one thread of {platform.machine()}, {cores}"
    total = (
        torch.cuda.get_device_properties(0).total_memory
        if on_gpu
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    single = tflops(torch.float32, on_gpu)
    each = operator_us(on_gpu)
    return Device(
        name=name,
        memory_gib=round(total / 2**30 / (1 if on_gpu else ranks), 2),
        reserved_gib=1.5 if on_gpu else 0.4,
        fragmentation=0.05,
        tflops_half=tflops(torch.bfloat16, on_gpu) if on_gpu else single,
        tflops_single=single,
        tflops_tf32=tflops(torch.float32, on_gpu, tf32=True) if on_gpu else single,
        memory_gbps=memory_gbps(on_gpu),
        products_efficiency=1.0,
        attention_efficiency=1.0,
        memory_efficiency=1.0,
        kernel_us=2.0 if on_gpu else each,
        launch_us=each if on_gpu else 0.0,
        gpus_per_node=ranks,
        inside="pcie",
        across="pcie",
        overlaps=on_gpu,
        on_gpu=on_gpu,
    )


def measured(on_gpu: bool, ranks: int) -> dict[str, Any]:
    """The content of a device's file, as far as one of `ranks` devices of a node tells it."""
    threads = torch.get_num_threads()
    if not on_gpu:
        torch.set_num_threads(1)
    try:
        content = dataclasses.asdict(corrected(measured_device(on_gpu, ranks)))
    finally:
        torch.set_num_threads(threads)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in content.items()}


def measure(ranks: int | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The content of a device's file and of its link's; a single device has no link to measure.

    `ranks`: number of devices that communicate; None: all GPUs, or two processes.
    """
    on_gpu = torch.cuda.is_available()
    ranks = ranks or (torch.cuda.device_count() if on_gpu else 2)
    content, link = measured(on_gpu, ranks), None
    if ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(sweep, (ranks, f"{folder}/store", on_gpu, results), ranks)
            found, crowding = results.get()
        content["crowding"] = round(crowding, 4)
        link = link_of("NCCL" if on_gpu else "processes of one machine", found)
    return content, link


def write_measured(output: Path, ranks: int | None) -> list[Path]:
    """Measure this machine and write the file of its device, with that of the link beside it. Returns their paths."""
    content, link = measure(ranks)
    files = {output: content}
    if link is not None:
        beside = output.with_name(f"{output.stem}_link.yaml")
        content |= {"inside": beside.name, "across": beside.name}
        files[beside] = link
    source = f"# Measured by `evodsp plan --measure` on {date.today()}, torch {torch.__version__}.\n"
    for path, values in files.items():
        write_text(path, source + yaml.safe_dump(values, sort_keys=False, default_flow_style=None))
    return list(files)
