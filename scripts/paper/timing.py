"""Part `time`: a training step by every method, side by side on gloo ranks, and the communication of a layer alone (table 9).

Only ratios within one run mean something: the ranks are processes that share two cores and their memory, "communication" is a
copy through the loopback device by these same cores, and four ranks take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.collectives import Gather, ScatterSum, Sum, Switch, shard_sizes

from .counting import CLAIMS
from .gloo_ranks import Groups as RankGroups
from .gloo_ranks import on_ranks
from .methods.base import RingGroup
from .methods.ring import Hop
from .part import Part, Row, Tables, Tick
from .rounds import Job, timed
from .workload import Workload

TABLE_9_MS = {"dsp": 914, "ulysses": 5828, "megatron_tp": 8412, "megatron_sp": 51908}
"""The paper's times of communication for a sequence of 8M, which has neither a number of GPUs nor a model."""


def part(settings: Mapping[str, Any]) -> Part:
    """`settings`: the section `time` of `experiments/cpu.yaml`."""
    ranks: list[int] = settings["ranks"]
    workload = Workload(**settings["workload"])
    jobs = [Job(method, n, workload) for n in ranks for method in CLAIMS]

    def measure(tick: Tick) -> Tables:
        seconds = timed(jobs, settings["rounds"], tick)
        steps = [
            {"method": job.method, "ranks": job.ranks, "round": number, "seconds": f"{found:.4f}"}
            for job, times in zip(jobs, seconds, strict=True)
            for number, found in enumerate(times)
        ]
        alone = on_ranks(
            max(ranks), communication_alone, settings["alone"]["shape"], ranks, settings["alone"]["rounds"], tick=tick
        )
        return {"time_steps": steps, "time_collectives": alone}

    return Part(
        "time",
        settings,
        ("timing.py", "rounds.py", "gloo_ranks.py"),
        measure,
    )


def communication_alone(
    groups: RankGroups, tick: Tick, shape: tuple[int, int, int, int], ranks: list[int], rounds: int
) -> list[Row]:
    """Seconds of the collectives that one layer launches in its forward pass, one after another, without computing anything.

    `shape`: of the whole sequence tensor [B, T, S, C].
    """
    rows: list[Row] = []
    layers = {n: _collectives(RingGroup(groups[n]), shape) for n in ranks if dist.get_rank() < n}
    for number in range(rounds + 1):
        tick(f"collectives alone, round {number} of {rounds}")
        for n in ranks:
            for method in CLAIMS:
                dist.barrier()
                if n not in layers:
                    continue
                start = time.perf_counter()
                layers[n][method]()
                dist.barrier(groups[n])
                if number:
                    seconds = time.perf_counter() - start
                    rows.append({"method": method, "ranks": n, "round": number - 1, "seconds": f"{seconds:.5f}"})
    return rows


def _collectives(group: RingGroup, shape: tuple[int, int, int, int]) -> dict[str, Callable[[], None]]:
    """The forward collectives of a layer by each method, on tensors of the right sizes."""
    batch, time_steps, space, channels = shape
    time_sizes, space_sizes = shard_sizes(time_steps, group.size), shard_sizes(space, group.size)
    whole = torch.zeros(shape)
    shard = torch.zeros(batch, time_sizes[group.rank], space, channels)
    switch = Switch(group, 1, 2, time_sizes, space_sizes)
    back, gather, scatter, add = (
        switch.transpose(),
        Gather(group, 1, time_sizes),
        ScatterSum(group, 1, time_sizes),
        Sum(group),
    )
    switched = torch.zeros(switch.result_shape(shard.shape))

    def ring() -> None:
        held: tuple[Tensor, ...] = (shard, shard)
        for _ in range(group.size - 1):
            held = Hop(held, group).wait()

    def repeated(times: int, *calls: tuple[Any, Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                for collective, x in calls:
                    collective.launch(x).wait()

        return run

    return {
        "dsp": repeated(1, (switch, shard), (back, switched)),
        "ulysses": repeated(1, (switch, shard), (switch, shard), (switch, shard), (back, switched)),
        "megatron_sp": repeated(4, (gather, shard), (scatter, whole)),
        "megatron_tp": repeated(4, (add, whole)),
        "ring": ring,
    }


def ratios(rows: list[Row] | Any, ranks: int, method: str) -> list[float]:
    """Seconds of a method over DSP's, round by round."""

    def times(name: str) -> list[float]:
        return [float(row["seconds"]) for row in rows if (row["ranks"], row["method"]) == (ranks, name)]

    return [mine / dsp for mine, dsp in zip(times(method), times("dsp"), strict=True)]
