"""Compile the Triton kernels that the GPU programs need, by all cores at once, into the cache that later processes read.

    python -m scripts.benchmarks.gpu_compile [--processes 12] [--limit 60]      python -m scripts.benchmarks.gpu_compile --cpu

One process compiles kernel after kernel, when it first meets each: for a minute or two of a GPU's time. Here each task runs a
block once, forward and backward, with the kernels of ONE operator and the plain implementation of the others, so that the
kernels of a block are compiled side by side, from the very tensors that a run gives them. What is left out, or fails, is
compiled later by the program that needs it. The exit code is 0 unless every task failed.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from evodsp.model.kernels import BACKENDS
from evodsp.model.kernels.operators import OPERATORS, Kernels, problem_of
from scripts.benchmarks import gpu_cases


@dataclass(frozen=True)
class Task:
    """One operator, in one block or by itself."""

    operator: str
    dtype: torch.dtype
    block: tuple[str, int, int] | None
    """Kind and sizes; None: the self-check of a run's start."""


def tasks(sizes: gpu_cases.Sizes, operators: Sequence[str]) -> list[Task]:
    """Blocks that are timed first, and bf16 before float32: the order in which the GPU programs need them."""
    single, half = torch.float32, torch.bfloat16
    blocks = dict.fromkeys((*sizes.blocks, *sizes.operators, *sizes.checks))
    cases = [
        *((half, block) for block in blocks),
        (half, None), (single, None),
        *((single, block) for block in dict.fromkeys((sizes.blocks[0], *sizes.checks))),
    ]  # fmt: skip
    return [Task(operator, dtype, block) for dtype, block in cases for operator in operators]


def compile_for(task: Task, device: torch.device, sizes: gpu_cases.Sizes, share: float) -> str:
    """Run a task in this process. Returns what failed, '' if nothing did. `share`: of the GPU's memory that it may take."""
    backend = importlib.import_module(BACKENDS[_backend(device)].module)
    function = getattr(backend, task.operator)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
    try:
        if task.block is None:
            return problem_of(task.operator, function, device, task.dtype)
        kernels = Kernels(**{task.operator: function})
        for _ in gpu_cases.block(gpu_cases.config_of(sizes), *task.block, device, task.dtype, kernels)():
            pass
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _backend(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "chunked"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all tasks, print how many of each block succeeded and what failed."""
    parser = argparse.ArgumentParser(prog="gpu_compile", description="Compile Triton kernels by all cores at once.")
    parser.add_argument("--cpu", action="store_true", help="try the program: tiny sizes, and nothing to compile")
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, min(12, (os.cpu_count() or 1) - 2)),
        help="processes that compile at once",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="begin no task later than this (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    device = torch.device("cpu" if options.cpu else "cuda")
    sizes = gpu_cases.TINY if options.cpu else gpu_cases.FULL
    backend = importlib.import_module(BACKENDS[_backend(device)].module)
    operators = [name for name in OPERATORS if hasattr(backend, name)]
    succeeded, problems = Counter[str](), dict[str, list[str]]()
    # Spawned, not forked: a process in which CUDA was used cannot be forked.
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(compile_for, task, device, sizes, 0.9 / options.processes): task
            for task in tasks(sizes, operators)
        }
        try:
            for future in as_completed(running, timeout=options.limit):
                task = running[future]
                if problem := future.result():
                    problems.setdefault(problem, []).append(f"{task.operator} {_name(task)}")
                else:
                    succeeded[_name(task)] += 1
        except TimeoutError:
            print(f"not all was begun within {options.limit:g} s")
            pool.shutdown(cancel_futures=True)
    for name, count in succeeded.items():
        print(f"{name}: {count} of {len(operators)} operators")
    for problem, names in problems.items():
        print(f"left to the programs that need it: {', '.join(names)}: {problem}")
    print(f"{sum(succeeded.values())} of {len(running)} tasks in {time.monotonic() - begun:.0f} s")
    return int(not succeeded)


def _name(task: Task) -> str:
    precision = "bf16" if task.dtype == torch.bfloat16 else "fp32"
    return f"{'self-check' if task.block is None else '{} {} x {}'.format(*task.block)}, {precision}"


if __name__ == "__main__":
    sys.exit(main())
