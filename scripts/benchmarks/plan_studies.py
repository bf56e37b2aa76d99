"""Plans AlphaFold2's initial training and fine-tuning on 8 to 512 GPUs of three kinds: calculated, not measured.

    python -m scripts.benchmarks.plan_studies --output scripts/benchmarks/results/plan_studies.csv

For each number of GPUs the fastest mesh that fits is a row. Then, for one case, what changes it: start-up times of collectives,
the network adapters, recomputation, the host's time for a launch.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.planner.choose import Planned, possible
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Device, Link, Links, load_device, load_link
from evodsp.planner.from_run import training_of
from evodsp.planner.mesh import Estimate, Training
from evodsp.planner.program import Program

STAGES = {"initial": "configs/af2_initial.yaml", "fine-tuning": "configs/af2_finetune.yaml"}
"""The config of each stage, which says how many samples it has."""
DEVICES = ("h100", "h200", "b200")
GPUS = (8, 16, 32, 64, 128, 256, 512)
MOST_RANKS = 16
COLUMNS = (
    "date", "study", "stage", "device", "gpus", "data", "sequence", "memory_gib", "blocks_kept", "step_s", "samples_per_s",
    "exposed", "launch_share", "days", "gpu_hours",
)  # fmt: skip


def best_of(planned: Planned, training: Training, gpus: int, programs: dict[int, Program]) -> Estimate | None:
    """The fastest mesh that fits."""
    try:
        groups = [group for group in possible(training, gpus) if group <= MOST_RANKS]
    except UserError:  # more devices than the batch has work for
        return None
    found = [planned.estimate(programs[group], gpus // group, group) for group in groups]
    return min((one for one in found if one.fits), key=lambda one: one.step_s, default=None)


def row(study: str, stage: str, device: Device, gpus: int, one: Estimate | None, samples: int) -> list[object]:
    """A line of the file; without numbers if nothing fits."""
    start: list[object] = [date.today(), study, stage, device.name, gpus]
    if one is None:
        return [*start, *[""] * (len(COLUMNS) - len(start))]
    hours = samples / one.samples_per_s / 3600
    numbers = (
        one.memory.total / 2**30,
        one.kept_blocks,
        one.step_s,
        one.samples_per_s,
        one.one.exposed / one.one.total,
    )
    rounded = [f"{value:.4g}" for value in (*numbers, one.one.host / one.one.total, hours / 24, hours * gpus)]
    return [*start, one.data, one.sequence, *rounded]


def variants(links: Links, training: Training) -> dict[str, tuple[Links, Training]]:
    """What the sensitivity studies change."""

    def started(factor: float) -> Links:
        def of(link: Link) -> Link:
            return dataclasses.replace(link, start_us={kind: factor * us for kind, us in link.start_us.items()})

        return Links(of(links.inside), of(links.across), links.per_node)

    def network(factor: float) -> Links:
        table = [[size, factor * rate] for size, rate in links.across.bandwidth]
        return dataclasses.replace(links, across=dataclasses.replace(links.across, bandwidth=table))

    return {
        **{f"start-up of collectives x {factor:g}": (started(factor), training) for factor in (0.0, 0.5, 2.0)},
        **{f"network bandwidth x {factor:g}": (network(factor), training) for factor in (0.5, 2.0)},
        "NVLink between nodes": (dataclasses.replace(links, across=links.inside), training),
        "CUDA graphs": (links, dataclasses.replace(training, graphs=True)),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan AlphaFold2's training on many numbers of GPUs.")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    given = parser.parse_args(arguments)
    rows: list[list[object]] = []
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        for stage, config in STAGES.items():
            training = training_of(PlanConfig(gpus=1, config=Path(config)))
            groups = [group for group in (1, 2, 4, 8, 16) if group <= MOST_RANKS]
            first = load_device(DEVICES[0])
            any_links = Links(load_link(first.inside), load_link(first.across), first.gpus_per_node)
            starts = {group: Planned(training, first, any_links, True, pool).start(group) for group in groups}
            programs = {group: start.result() for group, start in starts.items()}
            for name in DEVICES:
                device = load_device(name)
                links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
                planned = Planned(training, device, links, True, pool)
                for gpus in GPUS:
                    found = best_of(planned, training, gpus, programs)
                    rows.append(row("scaling", stage, device, gpus, found, training.samples))
                    print(*rows[-1][1:], flush=True)
            for label, (links, changed) in variants(any_links, training).items():
                planned = Planned(changed, first, links, True, pool)
                for gpus in (128, 512):
                    found = best_of(planned, changed, gpus, programs)
                    rows.append(row(label, stage, first, gpus, found, training.samples))
                    print(*rows[-1][1:], flush=True)
    with whole_file(given.output) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
