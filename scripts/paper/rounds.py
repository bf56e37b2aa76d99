"""Wall time of training steps on gloo ranks, in interleaved rounds: every job once in each round.

Neighbouring measurements see the same machine, so a ratio within a round means more than a ratio of two times. The order
rotates from round to round. A job on fewer ranks than there are leaves the others waiting, which takes no processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist

from .gloo_ranks import Groups as RankGroups
from .gloo_ranks import on_ranks
from .methods import Groups, method_named
from .part import Tick
from .transformer import Transformer
from .workload import Workload


@dataclass(frozen=True)
class Job:
    """A method on some ranks, and the size of its step: forward, backward and the reduction of gradients, no optimizer."""

    method: str
    ranks: int
    workload: Workload


def timed(jobs: Sequence[Job], rounds: int, tick: Tick) -> list[list[float]]:
    """Seconds of each job in each round, after one round that is not counted. Ticks once a round."""
    seconds: list[list[float]] = on_ranks(max(job.ranks for job in jobs), _on_rank, list(jobs), rounds, tick=tick)
    return seconds


def _on_rank(groups: RankGroups, tick: Tick, jobs: list[Job], rounds: int) -> list[list[float]]:
    rank = dist.get_rank()
    steps = [_step(job, groups[job.ranks]) if rank < job.ranks else None for job in jobs]
    seconds: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        tick(f"round {number} of {rounds}" if number else "warm-up")
        for place in range(len(jobs)):
            at = (place + number) % len(jobs)
            step, group = steps[at], groups[jobs[at].ranks]
            dist.barrier()
            if step is None:
                continue
            start = time.perf_counter()
            step()
            dist.barrier(group)  # until the last rank is done
            if number:
                seconds[at].append(time.perf_counter() - start)
    return seconds


def _step(job: Job, group: dist.ProcessGroup) -> Callable[[], None]:
    torch.manual_seed(0)
    method = method_named(job.method)
    parallel = method.apply(Transformer(job.workload.config), Groups(group))
    latents = torch.randn(job.workload.latents)

    def step() -> None:
        parallel.groups.layer_ledger.entries.clear()
        parallel.groups.end_ledger.entries.clear()
        parallel.zero_grad()
        parallel(latents).square().mean().backward()
        method.reduce_gradients(parallel)

    return step


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """The spread of at least two numbers."""
        low, _, high = quantiles(numbers, n=4, method="inclusive")
        return cls(low, median(numbers), high)
