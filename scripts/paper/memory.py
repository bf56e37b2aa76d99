"""Part `memory`: what a rank holds, by every method.

Activations are counted on tensors without memory (`one_rank.py`) at the paper's sizes, in bf16. At small sizes the same
counter watches real tensors on real ranks. Parameters are counted; the bytes that go with them are modelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import torch

from evodsp.errors import UserError
from scripts.benchmarks.peak_memory import PeakMemory

from .counting import CLAIMS
from .experiments import Case, cases
from .gloo_ranks import Groups as RankGroups
from .gloo_ranks import on_ranks
from .methods import Groups, method_named
from .methods.megatron_tp import TensorParallelMethod
from .one_rank import Passes, passes
from .part import Part, Row, Tables, Tick
from .transformer import Transformer
from .workload import Workload

GIB = 2**30
_REPEATS = 3
"""Steps of a method, of which the one with the lowest peak counts: gloo may hold messages longer while the machine is busy."""
CAPACITY = 78 * GIB
"""Bytes that a program gets of an H100 with "80 GB"."""
WEIGHTS, GRADIENTS, STATES = 2, 2, 12
"""Bytes per parameter: weights and gradients in bf16; weights and Adam's two moments in fp32."""
ALL_RANKS = 128
"""GPUs of the paper's end-to-end experiments, over which ZeRO-2 spreads gradients and states."""
RANKS = (1, 2, 4, 8, 16, 32, 64)


def held(method: str, workload: Workload, ranks: int) -> Passes:
    """Count one method. Raises UserError if it cannot spread this model over this number of ranks."""
    return passes("one_device" if ranks == 1 else method, workload, ranks)


def states(method: str, parameters: int, zero_ranks: int) -> int:
    """Bytes of weights, gradients and optimizer. As in the paper's appendix A.2.2: ZeRO-2 over `zero_ranks` ranks, except for
    tensor parallel methods, which hold all of their slice."""
    spread = 1 if isinstance(method_named(method), TensorParallelMethod) else zero_ranks
    return parameters * WEIGHTS + ceil(parameters * (GRADIENTS + STATES) / spread)


# ---- Figure 9: the sizes of weak scaling ----


def weak_rows(settings: Mapping[str, Any], tick: Tick) -> Iterator[Row]:
    """One row for every bar."""
    for case in weak_cases(settings):
        tick(case.name)
        workload, ranks = case.workload, case.sequence
        row: Row = {"model": workload.model, "ranks": ranks, "time": workload.time, "batch": workload.batch}
        row |= {"method": case.method, "refused": ""}
        try:
            found = held(case.method, workload, ranks)
        except UserError as error:
            yield row | {"refused": str(error)}
            continue
        row |= {"saved_bytes": found.saved, "peak_bytes": found.peak, "parameters": found.parameters}
        yield row | {"states_bytes": states(case.method, found.parameters, ranks)}


def weak_cases(settings: Mapping[str, Any]) -> list[Case]:
    """The bars to count."""
    return list(cases("table7")) if settings["weak"] else []


# ---- Table 4: the smallest groups that fit ----


def smallest_rows(settings: Mapping[str, Any], tick: Tick) -> Iterator[Row]:
    """One row for every model, length and method: the first number of ranks that fits into an H100."""
    paper = {(case.workload, case.method): case.sequence for case in cases("table4")}
    for model, time, method in smallest_cases(settings):
        tick(f"{method}, {model}, {time} x 4096 tokens: smallest number of ranks")
        workload = Workload(model, time, checkpoint=True)
        row: Row = {"model": model, "tokens": workload.tokens, "method": method}
        row |= {"paper_ranks": paper.get((workload, method), ""), "ranks": "", "too_few_bytes": ""}
        for ranks in RANKS:
            try:
                found = held(method, workload, ranks)
            except UserError as error:
                row["ranks"] = f"x: {error}"
                break
            needed = found.peak + states(method, found.parameters, ALL_RANKS)
            if needed <= CAPACITY:
                row |= {"ranks": ranks, "bytes": needed}
                break
            row["too_few_bytes"] = needed
        else:
            row["ranks"] = f"x: more than {RANKS[-1]} ranks"
        yield row


def smallest_cases(settings: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """(model, time, method) of the rows of `smallest_rows`."""
    return [
        (m, t, method)
        for m in settings["smallest"]["models"]
        for t in settings["smallest"]["times"]
        for method in CLAIMS
    ]


# ---- One layer, without recomputation ----


def layer_rows(settings: Mapping[str, Any], tick: Tick) -> Iterator[Row]:
    """What one layer keeps for the backward pass, in sequence tensors M: one device keeps 32, spread ideally 32 / N."""
    chosen = settings["layer"]
    for method in CLAIMS:
        for ranks in chosen["ranks"]:
            tick(f"{method}, one layer of {chosen['model']}, {ranks} ranks")
            workload = Workload(chosen["model"], chosen["time"])
            two, three = (held(method, dataclasses.replace(workload, layers=n), ranks) for n in (2, 3))
            saved = (three.saved - two.saved) / (2 * workload.sequence)
            yield {"model": workload.model, "ranks": ranks, "method": method, "saved_m": round(saved, 4)}


# ---- Real ranks ----


def measured_rows(settings: Mapping[str, Any], tick: Tick) -> list[Row]:
    """Every method on real ranks, and what is counted for the same sizes without them, in fp32."""
    chosen = settings["measured"]
    workloads = [Workload(**chosen["workload"], checkpoint=checkpoint) for checkpoint in (False, True)]
    most = max(chosen["ranks"])
    rows: list[Row] = on_ranks(most, measured_on_rank, workloads, chosen["ranks"], tick=tick)
    for row in rows:
        workload = dataclasses.replace(workloads[0], checkpoint=bool(row["recomputed"]))
        counted = passes(row["method"], workload, row["ranks"], torch.float32)
        row |= {"counted_saved_bytes": counted.saved, "counted_peak_bytes": counted.peak}
    return rows


def measured_on_rank(groups: RankGroups, tick: Tick, workloads: list[Workload], ranks: list[int]) -> list[Row]:
    """Rows of every method on every group that this rank belongs to."""
    rows: list[Row] = []
    for n in ranks:
        for method in CLAIMS:
            for workload in workloads:
                tick(f"{method} on {n} gloo ranks")
                if torch.distributed.get_rank() >= n:
                    continue
                torch.manual_seed(0)
                parallel = method_named(method).apply(Transformer(workload.config), Groups(groups[n]))
                for parameter in parallel.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                latents = torch.randn(workload.latents)
                saved, peak = min(_step(parallel, latents) for _ in range(_REPEATS))
                rows.append(
                    {
                        "method": method,
                        "ranks": n,
                        "recomputed": int(workload.checkpoint),
                        "m_bytes": workload.sequence * latents.element_size(),
                        "measured_saved_bytes": saved,
                        "measured_peak_bytes": peak,
                    }
                )
    return rows


def _step(model: torch.nn.Module, latents: torch.Tensor) -> tuple[int, int]:
    """Bytes that a forward pass keeps, and the most that are in use until the end of the backward pass."""
    with PeakMemory() as memory:
        output = model(latents)
        saved = memory.current
        output.sum().backward()
    return saved, memory.peak


# ---- The part ----


def part(settings: Mapping[str, Any]) -> Part:
    """`settings`: the section `memory` of `experiments/cpu.yaml`."""

    def measure(tick: Tick) -> Tables:
        return {
            "memory_weak": list(weak_rows(settings, tick)),
            "memory_smallest": list(smallest_rows(settings, tick)),
            "memory_layer": list(layer_rows(settings, tick)),
            "memory_measured": measured_rows(settings, tick),
        }

    return Part(
        "memory",
        settings,
        ("memory.py", "one_rank.py", "gloo_ranks.py", "experiments/table4.yaml", "experiments/table7.yaml"),
        measure,
        wrong,
    )


def wrong(tables: Tables) -> list[str]:
    """Where real tensors differ from what is counted without ranks by more than M: gloo may hold a message a little longer."""
    found = []
    for row in tables["memory_measured"]:
        for what in ("saved", "peak"):
            measured, counted = row[f"measured_{what}_bytes"], row[f"counted_{what}_bytes"]
            if abs(measured - counted) > row["m_bytes"]:
                found.append(f"{row['method']} on {row['ranks']} ranks: {measured} bytes {what}, {counted} counted")
    return found
