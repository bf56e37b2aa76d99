"""Compares the estimated memory and time of a prediction with what a fresh process takes, on a CPU.

    OMP_NUM_THREADS=1 python -m scripts.benchmarks.estimate_check --output scripts/benchmarks/results/estimate_check.csv

A model of full width with two blocks a stack, 4 templates, working memory of 256 MiB, one pass, through the code of
`evodsp predict` (`run_passes`, `structure_of`). Measured: the highest resident memory of the process (VmHWM) less that after
the imports and a pass of a small model. What the C library keeps of freed memory differs from process to process, so each size
is measured in several, and the median counts. Times are CPU seconds: the machine may be shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch

from evodsp.allocator import give_large_tensors_back
from evodsp.config import ModelConfig
from evodsp.data.records import ProteinSequence
from evodsp.inference.config import PredictConfig
from evodsp.inference.passes import run_passes, structure_of
from evodsp.inference.targets import Target
from evodsp.model.alphafold import AlphaFold
from evodsp.model.in_place import use_memory
from evodsp.planner.prediction import Prediction, prediction_memory, prediction_times
from evodsp.planner.program import Sizes, Step, sample_batch
from evodsp.planner.this_machine import this_cpu

from .tables import write_csv

CLUSTERS, EXTRA, TEMPLATES = 124, 512, 4
WORKING = 256 << 20
Precision = Literal["fp32", "bf16"]


def model_config() -> ModelConfig:
    config = ModelConfig.preset("model_1_ptm")
    return dataclasses.replace(
        config,
        evoformer=dataclasses.replace(config.evoformer, blocks=2),
        extra_msa=dataclasses.replace(config.extra_msa, blocks=2),
    )


def sizes(residues: int) -> Sizes:
    return Sizes(residues, CLUSTERS, EXTRA, TEMPLATES)


def resident(entry: str) -> float:
    """MiB of /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(entry))
    return int(line.split()[1]) / 1024


def predict(config: ModelConfig, of: Sizes, precision: Precision) -> float:
    """One pass; its CPU seconds."""
    model = AlphaFold(config).eval()
    use_memory(model, WORKING)
    batch = sample_batch(Step(config, of, half=False), torch.zeros)
    for name in ("seq_mask", "msa_mask", "extra_msa_mask"):
        batch[name] = torch.ones_like(batch[name])
    settings = PredictConfig(fasta=Path(), checkpoint=Path(), output=Path(), precision=precision)
    begun = time.process_time()
    output, _ = run_passes(model, batch, settings)
    structure_of(Target(ProteinSequence("one", "A" * of.residues), None), batch, output, model)
    return time.process_time() - begun


def measured(residues: int, precision: Precision) -> dict[str, Any]:
    """In this process."""
    predict(ModelConfig.preset("small"), Sizes(16, 4, 4), precision)
    gc.collect()
    before = resident("VmRSS")
    seconds = predict(model_config(), sizes(residues), precision)
    return {"mib": resident("VmHWM") - before, "seconds": seconds}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare estimated and measured memory and time of predictions.")
    parser.add_argument("--residues", type=int, nargs="+", default=(128, 256, 512, 768))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes a size")
    parser.add_argument("--output", type=Path, help="CSV file")
    parser.add_argument("--alone", action="store_true", help="measure in this process and print JSON")
    given = parser.parse_args(arguments)
    give_large_tensors_back()  # as the command does; processes that this one starts have its environment
    if given.alone:
        print(json.dumps(measured(given.residues[0], given.precision)))
        return 0
    device = this_cpu()
    rows = []
    for residues in given.residues:
        command = [sys.executable, "-m", "scripts.benchmarks.estimate_check", "--alone", "--precision", given.precision]
        command += ["--residues", str(residues)]
        found = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for _ in range(given.rounds)
        ]
        peaks = [one["mib"] for one in found]
        peak, took = statistics.median(peaks), statistics.median(one["seconds"] for one in found)
        what = Prediction(
            model_config(), sizes(residues), passes=1, half=given.precision == "bf16", on_gpu=False, memory=WORKING
        )
        memory = prediction_memory(what)
        mib, seconds = memory.total / 2**20, prediction_times(what, device).total
        row = {
            "date": date.today(), "torch": torch.__version__, "threads": os.environ.get("OMP_NUM_THREADS", "all"),
            "precision": given.precision, "residues": residues, "rounds": given.rounds, "measured_mib": round(peak),
            "low_mib": round(min(peaks)), "high_mib": round(max(peaks)), "estimated_mib": round(mib),
            "memory_ratio": round(mib / peak, 3), "at": memory.at, "measured_cpu_s": round(took, 1),
            "estimated_s": round(seconds, 1), "time_ratio": round(seconds / took, 2),
        }  # fmt: skip
        print(row, flush=True)
        rows.append(row)
    if given.output is not None:
        write_csv(given.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
