"""Part `modelled`: section 5 of the paper as evodsp's planner calculates it, since no GPUs are at hand.

Each bar of figures 5 to 8 is one rank's program, followed operator by operator (`one_rank.py`), with the times of a device
of data sheets (`h100.yaml`), and of its links from the planner's data files (NVLink 4, InfiniBand NDR). And each method's
collectives of one layer, alone, for a sequence of 8M tokens (table 9). Nothing is fitted to the paper.

What is calculated beside the program, from the number of parameters: Adam reads and writes 28 bytes of each that it updates;
ZeRO-2 reduces gradients in fp32 and gathers weights in bf16, tensor parallel methods add up fp32 gradients over data ranks.
That communication hides where the link is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.parallel.group import Kind
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.simulate import Times, simulate, spans
from evodsp.planner.trace import OUTSIDE, Operation

from .counting import BYTES, CLAIMS, of_one_collective
from .experiments import Case, cases
from .gpu import flops
from .memory import CAPACITY, GIB, states
from .methods import method_named
from .methods.megatron_tp import TensorParallelMethod
from .one_rank import Followed, follow
from .part import Part, Row, Tables, Tick
from .timing import TABLE_9_MS
from .workload import Workload

ADAM = 28
"""Bytes per parameter that Adam moves: gradient, weight and two moments read, the last three written, in fp32."""
GRADIENT, WEIGHT = 4, 2
"""Bytes per parameter in the reduction of gradients, and in the gathering of weights."""
TABLE_9_TOKENS = 2**23
HERE = Path(__file__).resolve().parent
PLANNER = (
    "trace.py",
    "simulate.py",
    "device.py",
    "links/nvlink4.yaml",
    "links/infiniband.yaml",
)
"""Files of the planner that the results follow from."""


def part(settings: Mapping[str, Any]) -> Part:
    """`settings`: the section `modelled` of `experiments/cpu.yaml`."""
    device = load_device(str(HERE / f"{settings['device']}.yaml"))
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    bars = [case for table in settings["tables"] for case in cases(table)]
    if models := settings.get("only"):
        bars = [case for case in bars if case.workload.model in models and case.sequence <= settings["most_ranks"]]

    def measure(tick: Tick) -> Tables:
        rows = []
        for case in bars:
            tick(case.name)
            rows.append(row_of(case, device, links))
        alone = [
            collectives_alone(method, model, ranks, links)
            for model in settings["alone"]["models"]
            for ranks in settings["alone"]["ranks"]
            for method in CLAIMS
        ]
        return {"modelled": rows, "modelled_alone": alone}

    return Part(
        "modelled",
        settings,
        (
            *("modelled.py", "one_rank.py"),
            *(f"experiments/{table}.yaml" for table in settings["tables"]),
            *(f"../../evodsp/planner/{name}" for name in PLANNER),
            f"{settings['device']}.yaml",
        ),
        measure,
    )


def row_of(case: Case, device: Device, links: Links) -> Row:
    """A bar: its time, or why there is none."""
    workload = case.workload
    row: Row = {"table": case.table, "model": workload.model, "place": case.place, "time": workload.time}
    row |= {"batch": workload.batch, "ranks": case.ranks, "sequence": case.sequence, "data": case.data}
    row |= {"method": case.method, "status": "x", "reason": "", "milliseconds": "", "tokens_per_second": ""}
    row |= {"tflops_per_gpu": "", "exposed_share": "", "collectives_ms": "", "gib": ""}
    try:
        found = follow(case.method, workload, case.sequence, case.training)
    except UserError as error:
        return row | {"reason": str(error)}
    held = found.peak
    held += states(case.method, found.parameters, case.ranks) if case.training else WEIGHT * found.parameters
    row["gib"] = round(held / GIB, 1)
    if held > CAPACITY:
        return row | {"reason": f"out of memory: needs {held / GIB:.0f} GiB"}
    times = timed(found, case.sequence, device, links)
    step = times.total
    if case.training:
        step += outside(case, found.parameters, times, device, links)
    return row | {
        "status": "ok",
        "milliseconds": round(1000 * step, 2),
        "tokens_per_second": round(case.data * workload.batch * workload.tokens / step),
        "tflops_per_gpu": round(case.data * flops(workload, case.training) / case.ranks / step / 1e12, 1),
        "exposed_share": round(times.exposed / step, 3),
        "collectives_ms": round(1000 * times.communication, 2),
    }


def timed(found: Followed, ranks: int, device: Device, links: Links) -> Times:
    """The program on the device, with its collectives on the links."""
    return simulate(spans(found.events, device), 1e-6 * device.launch_us, link_of(links, ranks), device.overlaps)


def link_of(links: Links, ranks: int) -> Callable[[Kind, int], float]:
    """Seconds of a collective of neighbouring ranks by its kind and the bytes that the ledger counts; of a hop by its bytes."""

    def seconds(kind: Kind, counted: int) -> float:
        if kind != "send-receive":
            return links.seconds(kind, counted, ranks)
        hop = links.inside if ranks <= links.per_node else links.across  # the slowest hop of the ring
        return hop.start(kind) + hop.seconds(kind, float(counted))

    return seconds


def outside(case: Case, parameters: int, times: Times, device: Device, links: Links) -> float:
    """Seconds that a step takes beside the program: the optimizer, and what of the data ranks' communication does not hide."""
    if isinstance(method_named(case.method), TensorParallelMethod):
        updated = parameters
        reducing = links.apart("all-reduce", 2 * GRADIENT * parameters, case.data, case.sequence)
    else:
        updated = parameters // case.ranks
        reducing = links.seconds("reduce-scatter", GRADIENT * parameters, case.ranks)
        reducing += links.seconds("all-gather", WEIGHT * parameters, case.ranks)
    idle = times.total - times.communication
    adam = Operation(OUTSIDE, "backward", "adam", 0, ADAM * updated, 1, False, 0)
    return device.seconds(adam) + max(0.0, reducing - idle)


def collectives_alone(method: str, model: str, ranks: int, links: Links) -> Row:
    """The collectives of one layer's forward pass, one after another, for the sequence of table 9."""
    m = TABLE_9_TOKENS * Workload(model, 1).config.width
    link, seconds, counted = link_of(links, ranks), 0.0, 0.0
    for kind, calls in CLAIMS[method].collectives.items():
        size = BYTES * m * of_one_collective(kind, ranks)
        counted += float(calls * size)
        if kind == "send-receive":  # keys and values go together, N - 1 times
            seconds += (ranks - 1) * link(kind, int(calls * size / ranks))
        else:
            seconds += calls * link(kind, int(size))
    paper = TABLE_9_MS.get(method)
    return {
        "model": model,
        "ranks": ranks,
        "method": method,
        "milliseconds": round(1000 * seconds, 2),
        "counted_gb": round(counted / 1e9, 2),
        "paper_ms": paper or "",
        "paper_gbps": round(counted / 1e6 / paper, 1) if paper else "",
    }


def speedup(rows: Any, other: str, **where: Any) -> list[float]:
    """DSP's throughput over that of another method, at each size where both have one."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if all(row[name] == value for name, value in where.items()) and row["status"] == "ok":
            size = row["model"], row["place"], row["time"], row["ranks"], row["batch"]
            found.setdefault(size, {})[row["method"]] = float(row["milliseconds"])
    return [times[other] / times["dsp"] for times in found.values() if other in times and "dsp" in times]
