"""Compares the planner's time of a training step with a measured one, on one process and on two ranks of this machine.

    evodsp plan --measure --output runs/mine.yaml
    python -m scripts.benchmarks.plan_check --device runs/mine.yaml --output scripts/benchmarks/results/plan_check.csv

A step is one pass with gradients: forward, loss, backward; one thread a rank, dropout on. Steps of one rank and of two are
interleaved; the median of `--rounds` is compared. It needs an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evodsp.config import EvoformerConfig, LossConfig, ModelConfig
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import init_mesh
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.program import PlannedStep, SampleSizes, program, sample_batch
from evodsp.planner.simulate import items_of, simulate
from evodsp.rng import Draws

from .tables import write_csv


def cases() -> dict[str, PlannedStep]:
    """The quickstart's model at its size, and one of AlphaFold2's widths with few blocks."""
    wide = ModelConfig.preset("model_3")

    def few(stack: EvoformerConfig, blocks: int) -> EvoformerConfig:
        return dataclasses.replace(stack, blocks=blocks, checkpoint=True)

    wide = dataclasses.replace(wide, evoformer=few(wide.evoformer, 2), extra_msa=few(wide.extra_msa, 1))
    common: dict[str, Any] = {"loss": LossConfig(), "half": False, "on_gpu": False}
    return {
        "small": PlannedStep(ModelConfig.preset("small"), SampleSizes(56, 16, 32), **common),
        "wide": PlannedStep(wide, SampleSizes(64, 32, 64), **common),
    }


def predicted(step: PlannedStep, ranks: int, device: Device, links: Links) -> float:
    """Seconds by the planner."""
    items = items_of(program(dataclasses.replace(step, ranks=ranks)), device, ranks)
    link = links.seconds
    return simulate(items, 0.0, lambda kind, counted: link(kind, counted, ranks), device.overlaps).total


class Measured:
    """A real step on this rank."""

    def __init__(self, step: PlannedStep, exchange: Exchange) -> None:
        self._step, self._model = step, AlphaFold(step.model)
        use_exchange(self._model, exchange)
        self._batch = sample_batch(step, torch.zeros)
        for name in ("seq_mask", "msa_mask", "extra_msa_mask", "all_atom_mask", "resolution"):
            self._batch[name] = torch.ones_like(self._batch[name])

    def seconds(self) -> float:
        """Seconds of forward pass, loss and backward pass."""
        begun = time.perf_counter()
        output = self._model(self._batch, [Draws.root(0)])
        assert self._step.loss is not None
        loss, _ = total_loss(output, self._batch, self._step.loss, self._step.model.heads, self._model.exchange)
        loss.backward()
        took = time.perf_counter() - begun
        self._model.zero_grad()
        return took


def measure(rank: int, store: str, rounds: int, results: Any) -> None:
    """The times of all cases, on one rank and on two, by turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = init_mesh(2).sequence_group()
    found: dict[tuple[str, int], list[float]] = {}
    for name, step in cases().items():
        alone, shared = Measured(step, LocalExchange()), Measured(step, ShardedExchange(group))
        for turn in range(rounds + 1):
            dist.barrier()
            if rank == 0:
                took = alone.seconds()
                if turn:  # the first one warms up
                    found.setdefault((name, 1), []).append(took)
            dist.barrier()
            took = shared.seconds()
            if turn:
                found.setdefault((name, 2), []).append(took)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare planned and measured steps.")
    parser.add_argument("--device", required=True, help="file that `evodsp plan --measure` wrote")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    given = parser.parse_args(arguments)
    device = load_device(given.device)
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure, (f"{folder}/store", given.rounds, results), 2)
        found = results.get()
    rows = []
    for (name, ranks), times in found.items():
        planned, median = predicted(cases()[name], ranks, device, links), statistics.median(times)
        numbers = {"measured_s": median, "low_s": min(times), "high_s": max(times), "planned_s": planned}
        numbers |= {"planned_to_measured": planned / median}
        row = {"date": date.today(), "torch": torch.__version__, "case": name, "ranks": ranks}
        rows.append(row | {column: f"{number:.4f}" for column, number in numbers.items()})
        print(f"{name}, {ranks} ranks: measured {median:.3f} s, planned {planned:.3f} s, {planned / median:.2f}")
    write_csv(given.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
