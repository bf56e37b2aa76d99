"""Does a training run grow or slow down? A thousand steps with all noise on, a sample over two ranks.

    python -m scripts.benchmarks.long_run [--steps 1000] [--ranks 2]

Trains a small model on the bundled families, with dropout, masking, cropping, block deletion, drawn recycling, validations and
checkpoints. Each rank notes its resident memory and its processor time every 50 steps. The table shows both; the last lines
compare the end with step 100: memory, and processor time a step of the last third with that of the first third after step
100. Processor time, because other programs of the machine change it least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.training.throughput import memory_used

ROOT = Path(__file__).resolve().parents[2]
EVERY, WARM = 50, 100

CONFIG = f"""
model:
  channels: {{msa: 12, pair: 10, extra_msa: 6, single: 14}}
  extra_msa: &stack {{blocks: 1, msa_heads: 2, msa_head_width: 3, pair_heads: 2, pair_head_width: 3, triangle_channels: 5,
    outer_product_channels: 3, transition_factor: 2}}
  evoformer: *stack
  structure_module: {{iterations: 1, heads: 2, query_points: 2, value_points: 2, angle_channels: 6}}
  heads: {{plddt_channels: 6}}
  optimizer: {{warmup_samples: 3, lr: 1.0e-3}}
data:
  alignment_dir: {ROOT}/data/alignments
  structure_dir: {ROOT}/data/mmcif_files
  validation_chains: [s005_A]
  samples_per_epoch: 250
  train: {{crop_size: 24, msa_clusters: 8, extra_msa: 12, recycles: 3, block_delete: true}}
  validation: {{crop_size: 29, msa_clusters: 5, extra_msa: 6, recycles: 0, uniform_recycling: false}}
trainer: {{accelerator: cpu, log_every_n_steps: 10}}
checkpoint_every: 100
"""


class Note(Callback):
    """Appends (step, bytes of memory, seconds of processor time) of this rank to a file in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % EVERY == 0:
            with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
                print(
                    json.dumps([trainer.global_step, memory_used(torch.device("cpu")), time.process_time()]), file=file
                )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps, at least 250")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share a sample")
    options = parser.parse_args(words)
    if options.steps < 2 * WARM + EVERY:
        parser.error(f"--steps is {options.steps}, but must be at least {2 * WARM + EVERY}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(CONFIG)
        callback = f"{{class_path: scripts.benchmarks.long_run.Note, init_args: {{folder: {folder}}}}}"
        command = [sys.executable, "-m", "evodsp", "fit", f"--config={config}", f"--output={folder}/run",
                   f"--trainer.max_steps={options.steps}", f"--parallel.sequence={options.ranks}",
                   f"--trainer.callbacks={callback}"]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        if done.returncode:
            return done.returncode
        notes = [
            [json.loads(line) for line in (Path(folder) / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(options.ranks)
        ]
    print(f"torch {torch.__version__}, {options.ranks} rank(s), {options.steps} steps")
    report(notes)
    return 0


def report(notes: Sequence[Sequence[tuple[int, int, float]]]) -> None:
    """Print what each rank noted, and how the end compares with step 100."""
    print("rank  step  memory (MiB)  processor time a step (ms)")
    for rank, rows in enumerate(notes):
        for (before, _, begun), (step, memory, ended) in pairwise(rows):
            print(f"{rank:4}  {step:4}  {memory / 2**20:12.1f}  {1000 * (ended - begun) / (step - before):8.1f}")
    for rank, rows in enumerate(notes):
        warm = [row for row in rows if row[0] >= WARM]
        third = max(1, (len(warm) - 1) // 3)
        growth = 100 * (warm[-1][1] / warm[0][1] - 1)
        slower = 100 * (pace(warm[-third - 1], warm[-1]) / pace(warm[0], warm[third]) - 1)
        print(
            f"rank {rank}: memory {growth:+.2f} % from step {warm[0][0]} to {warm[-1][0]}; a step takes {slower:+.1f} %"
        )


def pace(first: tuple[int, int, float], last: tuple[int, int, float]) -> float:
    """Seconds of processor time a step."""
    return (last[2] - first[2]) / (last[0] - first[0])


if __name__ == "__main__":
    raise SystemExit(main())
