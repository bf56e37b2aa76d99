"""Compares the planner's memory of a training step with the resident memory of processes that run one.

    python -m scripts.benchmarks.plan_memory --output scripts/benchmarks/results/plan_memory.csv

A step is one pass with gradients (forward, loss, backward) of AlphaFold2's widths with few blocks, in fp32, on one process and
on two gloo ranks, one thread a rank. Measured: the highest resident memory of rank 0 (VmHWM) less that after a step of a small
model, which loads what a step needs. The planner counts tensors; what the C library keeps of freed ones depends on settings. So
each step runs as the commands of evodsp do (`evodsp.allocator`), with glibc's defaults, and with each freed tensor given back
(MALLOC_MMAP_THRESHOLD_=65536), which is slow, but shows what is in use.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from evodsp.allocator import give_large_tensors_back
from evodsp.config import LossConfig, ModelConfig
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.mesh import init_mesh
from evodsp.planner.program import Sizes, Step, program
from evodsp.planner.walk import Span, items_of

from .estimate_check import resident
from .plan_check import Measured, cases
from .tables import write_csv

SIZES = {f"{n.clusters}x{n.residues}": n for n in (Sizes(96, 64, 96), Sizes(128, 64, 128))}
ALLOCATORS = {"evodsp": {"THP_MEM_ALLOC_ENABLE": "1"}, "glibc": {}, "in_use": {"MALLOC_MMAP_THRESHOLD_": "65536"}}
"""Environments of the processes."""


def step_of(size: str, recomputed: bool) -> Step:
    """A step of few blocks."""
    wide = ModelConfig.preset("model_3")
    evoformer = dataclasses.replace(wide.evoformer, blocks=2, checkpoint=recomputed)
    extra = dataclasses.replace(wide.extra_msa, blocks=1, checkpoint=recomputed)
    model = dataclasses.replace(wide, evoformer=evoformer, extra_msa=extra)
    return Step(model, SIZES[size], LossConfig(), half=False, on_gpu=False)


def planned(step: Step, ranks: int) -> float:
    """MiB that a step makes, at most."""
    items = items_of(program(dataclasses.replace(step, ranks=ranks)), lambda work: 0.0)
    return max(item.peak for item in items if isinstance(item, Span)) / 2**20


def measured(step: Step, rank: int, ranks: int, store: str) -> tuple[float, float]:
    """MiB by which this rank's memory grows, at most, and CPU seconds of the second step."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # recomputation loads it: 120 MiB
    exchange: Exchange = LocalExchange()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        exchange = ShardedExchange(init_mesh(ranks).sequence_group())
    Measured(cases()["small"], exchange).seconds()
    of_step = Measured(step, exchange)
    gc.collect()
    before = resident("VmRSS")
    of_step.seconds()
    grown, begun = resident("VmHWM") - before, time.process_time()
    of_step.seconds()
    return grown, time.process_time() - begun


def run(size: str, recomputed: bool, ranks: int, environment: dict[str, str]) -> tuple[float, float]:
    """`measured` of rank 0, in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.benchmarks.plan_memory", "--size", size, "--store", f"{folder}/store"]
        command += ["--recomputed"] if recomputed else []
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--ranks", str(ranks)],
                stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: {' '.join(command)}")
    mib, seconds = map(float, printed[0].splitlines()[-1].split())
    return mib, seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare planned and measured memory of training steps.")
    parser.add_argument("--output", type=Path, help="CSV file")
    parser.add_argument("--size", choices=SIZES, help="measure one step in this process and print MiB")
    parser.add_argument("--recomputed", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store", default="")
    given = parser.parse_args(arguments)
    if given.size:
        if "THP_MEM_ALLOC_ENABLE" in os.environ:
            give_large_tensors_back()
        print(*measured(step_of(given.size, given.recomputed), given.rank, given.ranks, given.store))
        return 0
    rows = []
    for size in SIZES:
        for recomputed in (False, True):
            for ranks in (1, 2):
                plan = planned(step_of(size, recomputed), ranks)
                row = {
                    "date": date.today(),
                    "torch": torch.__version__,
                    "msa_x_residues": size,
                    "recomputed": recomputed,
                }
                row |= {"ranks": ranks, "planned_mib": round(plan)}
                for name, environment in ALLOCATORS.items():
                    found, seconds = run(size, recomputed, ranks, environment)
                    row |= {f"{name}_mib": round(found), f"planned_to_{name}": round(plan / found, 3)}
                    row[f"{name}_cpu_s"] = round(seconds, 1)
                print(row, flush=True)
                rows.append(row)
    if given.output is not None:
        write_csv(given.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
