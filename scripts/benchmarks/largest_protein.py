"""The longest chain that 1 to 64 GPUs can predict, and how long a pass through it takes: calculated, not measured.

    python -m scripts.benchmarks.largest_protein --output scripts/benchmarks/results/largest_protein.csv

For each device and number of ranks, the residues are halved and doubled until the chain just fits into the memory of a device
(`evodsp estimate` counts the same way). The model is model_1_ptm in bf16 with 508 clusters, 1,024 extra sequences and no
templates; working memory is what `--working_memory auto` gives. Up to eight ranks are in one node.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from evodsp.config import ModelConfig
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.prediction import Prediction, prediction_memory, prediction_times
from evodsp.planner.program import Sizes

from .tables import write_csv

DEVICES = ("h100", "h200", "b200")
RANKS = (1, 2, 4, 8, 16, 32, 64)
CLUSTERS, EXTRA = 508, 1024
STEP = 128
"""Residues; the answer is a multiple."""
MOST = 1 << 17
"""Residues; nothing larger is tried."""


def prediction(device: Device, residues: int, ranks: int) -> Prediction:
    """One pass. A device's usable memory is a little less than all, 1/32 of which is working memory."""
    return Prediction(
        ModelConfig.preset("model_1_ptm"),
        Sizes(residues, CLUSTERS, EXTRA, 0),
        passes=1,
        ranks=ranks,
        half=True,
        memory=device.usable // 32,
    )


def largest(fits: Callable[[int], bool]) -> int:
    """The largest multiple of `STEP` that fits, 0 if none does. What fits grows with nothing but smaller sizes."""
    least, most = 0, MOST // STEP
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle * STEP) else (least, middle - 1)
    return least * STEP


def row(name: str, ranks: int) -> dict[str, Any]:
    """A line of the table."""
    device = load_device(name)
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    residues = largest(lambda size: prediction_memory(prediction(device, size, ranks)).total <= device.usable)
    what = prediction(device, residues, ranks)
    memory, times = prediction_memory(what), prediction_times(what, device, links)
    return {
        "date": date.today(), "device": device.name, "gpus": ranks, "residues": residues,
        "memory_gib": round(memory.total / 2**30, 1), "of_gib": round(device.usable / 2**30, 1),
        "pair_gib": round(memory.pair / 2**30, 1), "at": memory.at, "pass_min": round(times.total / 60, 1),
        "exposed": round(times.exposed / times.total, 3),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The longest chain for 1 to 64 GPUs, calculated.")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    parser.add_argument("--devices", nargs="+", default=DEVICES)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    given = parser.parse_args(arguments)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        cases = [(name, ranks) for name in given.devices for ranks in given.ranks]
        rows = []
        for found in pool.map(row, *zip(*cases, strict=True)):
            print(found, flush=True)
            rows.append(found)
    write_csv(given.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
