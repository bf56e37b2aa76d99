"""Time of what `evodsp.parallel.group.Group` does on CPUs, beside gloo's own operations.

    python -m scripts.benchmarks.gloo [--ranks 2] [--rounds 150]

Microseconds from the launch to the end of the wait, the median over rounds in which all take turns, with a small matrix product
between them, as in a model. Wants an idle machine with a core for each rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evodsp.parallel.group import Group

SIZES = (800, 20_000, 100_000, 1_000_000)
"""Numbers of 4 bytes that a rank sends in an all-to-all or a reduction, or receives in a gather."""


def operations(group: Group, size: int) -> dict[str, Callable[[], None]]:
    """Each kind of communication: gloo's own operation, and evodsp's."""
    ranks = group.size
    part = size // ranks
    x, y = torch.randn(part * ranks), torch.empty(part * ranks)
    mine = torch.randn(part)
    counts = [part] * ranks

    kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all-to-all": (
            lambda: dist.all_to_all_single(y, x, async_op=True),
            lambda: group.all_to_all(y, x, counts, counts),
        ),
        "all-gather": (
            lambda: dist.all_gather_single(y, mine, async_op=True),
            lambda: group.all_gather(y, mine),
        ),
        "reduce-scatter": (
            lambda: dist.reduce_scatter_single(mine, x, async_op=True),
            lambda: group.reduce_scatter(mine, x),
        ),
        "all-reduce": (
            lambda: dist.all_reduce(x.zero_(), async_op=True),
            lambda: group.all_reduce(x.zero_()),
        ),
    }

    def awaited(launch: Callable[[], Any]) -> Callable[[], None]:
        return lambda: launch().wait()

    timed = {}
    for kind, (by_gloo, ours) in kinds.items():
        timed[f"{kind}: gloo"] = awaited(by_gloo)
        timed[f"{kind}: evodsp"] = awaited(ours)
    return timed


def measure(rank: int, ranks: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    work = torch.randn(200, 200)
    whole = dist.distributed_c10d._get_default_group()
    group = Group(whole)
    for size in SIZES:
        timed = operations(group, size)
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(rounds):
            for name, run in timed.items():
                torch.mm(work, work)
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        if rank == 0:
            found = {name: statistics.median(values[rounds // 5 :]) for name, values in seconds.items()}
            for kind in dict.fromkeys(name.partition(":")[0] for name in found):
                row = (f"{1e6 * found[f'{kind}: {carrier}']:10.0f}" for carrier in ("gloo", "evodsp"))
                print(f"{size:<9}{kind:<15}" + "".join(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=150)
    options = parser.parse_args()
    print(f"{options.ranks} ranks, torch {torch.__version__}, {platform.machine()}, medians in microseconds")
    print(f"{'numbers':<9}{'':<15}{'gloo':>10}{'evodsp':>10}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.ranks, f"{folder}/store", options.rounds), options.ranks)


if __name__ == "__main__":
    main()
