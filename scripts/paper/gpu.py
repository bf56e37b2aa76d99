"""The paper's experiments on GPUs, one case a run; `gpu.sh` starts all of them.

    python -m scripts.paper.gpu list --gpus 8                      name and number of ranks of every case for 8 GPUs
    torchrun --nproc-per-node 8 -m scripts.paper.gpu run NAME --gpus 8 --output DIR
    python -m scripts.paper.gpu report --output DIR                the results as results.csv, results.txt and PNG files

A case is a bar of figure 5, 6, 7, 8 or 9: a method, a model, a size and a number of GPUs (`experiments/*.yaml`). `run` writes
NAME.json with the time of each step (CUDA events), and the largest memory allocated and reserved on any rank. A case that runs
out of memory, or whose model the method cannot spread, gets the status 'x', as in the figures. --cpu tries the program on
CPU ranks with a tiny model.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from evodsp.errors import UserError, nearest
from evodsp.files import check_output_folder, write_text
from evodsp.launch import process_group

from . import gpu_report
from .experiments import TABLES, Case, cases
from .gpu_step import built
from .workload import Workload

WARM_UP, STEPS = 3, 10


def available(gpus: int, tables: Sequence[str] = TABLES, cpu: bool = False) -> Iterator[Case]:
    """The cases that fit on `gpus` GPUs. Table 4's have fewer data ranks there. `cpu`: the same with a tiny model."""
    seen = set()
    for table in tables:
        for case in cases(table):
            if case.data > 1:
                case = dataclasses.replace(case, data=min(case.data, gpus // case.sequence))
            if cpu:
                tiny = Workload("tiny", 4, 4, 4, min(2, case.workload.batch), checkpoint=True)
                case = dataclasses.replace(case, workload=tiny)
            if case.data and case.ranks <= gpus and case.name not in seen:
                seen.add(case.name)
                yield case


def case_named(name: str, gpus: int, cpu: bool) -> Case:
    """Raises UserError if there is none of this name for this number of GPUs."""
    found = {case.name: case for case in available(gpus, cpu=cpu)}
    if name not in found:
        raise UserError(f"{name}: is not a case for {gpus} GPUs; `list` shows them.{nearest(name, found)}")
    return found[name]


def measured(case: Case, device: torch.device, warm_up: int = WARM_UP, steps: int = STEPS) -> dict[str, Any]:
    """Time and memory of a case, the same on every rank; status 'x' if the method cannot spread the model."""
    try:
        step, _ = built(case, device)
    except UserError as error:
        return {"status": "x", "reason": str(error)}
    for _ in range(warm_up):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [_largest(timed(step, device), device) for _ in range(steps)]
    result: dict[str, Any] = {"status": "ok", "seconds": seconds}
    if device.type == "cuda":
        result["allocated_bytes"] = _largest(torch.cuda.max_memory_allocated(), device)
        result["reserved_bytes"] = _largest(torch.cuda.max_memory_reserved(), device)
    took = median(seconds)
    result["tokens_per_second"] = case.data * case.workload.batch * case.workload.tokens / took
    result["tflops_per_gpu"] = case.data * flops(case.workload, case.training) / case.ranks / took / 1e12
    return result


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one step on this rank."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def flops(workload: Workload, training: bool) -> float:
    """Floating point operations of the layers for all samples of a workload, recomputation not counted."""
    config, space = workload.config, workload.rows * workload.columns
    per_token = 2 * 24 * config.width**2 + 4 * config.width * (workload.time + space)  # two blocks; MLPs of ratio 4
    return (3 if training else 1) * workload.batch * workload.tokens * config.layers * per_token


def _largest(value: float, device: torch.device) -> float:
    """Over all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def run(options: argparse.Namespace) -> int:
    """Measure one case as a rank that torchrun or srun started, and write its result on rank 0."""
    case = case_named(options.case, options.gpus, options.cpu)
    check_output_folder(options.output)
    process_group.start("gloo" if options.cpu else None)
    if dist.get_world_size() != case.ranks:
        raise UserError(f"{case.name} needs {case.ranks} ranks, but {dist.get_world_size()} were started")
    device = torch.device("cpu") if options.cpu else torch.device("cuda", torch.cuda.current_device())
    try:
        result = measured(case, device)
    except torch.OutOfMemoryError as error:
        # The other ranks wait in a collective: end this one, and the launcher ends them.
        write(options.output, case, {"status": "x", "reason": f"out of memory: {str(error).splitlines()[0]}"})
        sys.stdout.flush()
        os._exit(OUT_OF_MEMORY)
    if dist.get_rank() == 0:
        write(options.output, case, result | {"device": _name(device)})
    process_group.stop()
    return 0


OUT_OF_MEMORY = 5
"""Exit code of a rank whose GPU is full."""


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def write(folder: Path, case: Case, result: dict[str, Any]) -> None:
    """Write a case's result as NAME.json."""
    about = dataclasses.asdict(case) | {"ranks": case.ranks, "torch": torch.__version__}
    about["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    write_text(folder / f"{case.name}.json", json.dumps(about | result, indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "run", "report"))
    parser.add_argument("case", nargs="?", help="name of the case to run")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs that there are, on all machines together (default: 1)"
    )
    parser.add_argument("--only", nargs="+", default=TABLES, help="experiments to list (default: all)")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on CPU ranks")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/paper_gpu"), help="folder of results (default: %(default)s)"
    )
    options = parser.parse_args(words)
    try:
        for table in options.only:
            if table not in TABLES:
                raise UserError(f"--only {table}: is not an experiment; use one of {', '.join(TABLES)}")
        if options.command == "list":
            for case in available(options.gpus, options.only, options.cpu):
                print(case.name, case.ranks)
            return 0
        if options.command == "run":
            return run(options)
        print(gpu_report.report(options.output), end="")
        return 0
    except UserError as error:
        print(f"gpu: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
