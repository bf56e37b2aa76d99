"""A small run on the bundled families in processes of its own, which tests kill, stop and starve; and a look at its ranks.

The program does not help: the test finds the ranks by their environment, as an administrator would.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evodsp.report.runs import RESUMED, read_curve
from evodsp.training.logs import MEASURED
from tests.builders.processes import ROOT, begin

STEPS, EVERY = 24, 4
KILLED_AFTER = 9
"""Ranks are killed after this step has been logged: two checkpoints exist, and the last one is of an earlier step."""
PATIENCE_S = 240.0
"""Time limit for what takes seconds on an idle machine."""

Started = subprocess.Popen[str]

TINY = """
model:
  channels: {msa: 12, pair: 10, extra_msa: 6, single: 14}
  extra_msa: &stack {blocks: 1, msa_heads: 2, msa_head_width: 3, pair_heads: 2, pair_head_width: 3, triangle_channels: 5,
    outer_product_channels: 3, transition_factor: 2}
  evoformer: *stack
  structure_module: {iterations: 1, heads: 2, query_points: 2, value_points: 2, angle_channels: 6}
  heads: {plddt_channels: 6}
  optimizer: {warmup_samples: 3, lr: 1.0e-3}
  ema_decay: 0.9
data:
  train_chains: [s001_A, s002_A, s003_A]
  validation_chains: [s005_A]
  samples_per_epoch: 10
  train: {crop_size: 23, msa_clusters: 7, extra_msa: 9, recycles: 1, block_delete: true}
  validation: {crop_size: 29, msa_clusters: 5, extra_msa: 6, recycles: 0, uniform_recycling: false}
trainer: {accelerator: cpu, log_every_n_steps: 1, enable_progress_bar: false}
parallel: {sequence: 2}
"""


def write_config(path: Path) -> Path:
    """Write the options of the run."""
    folders = f"  alignment_dir: {ROOT}/data/alignments\n  structure_dir: {ROOT}/data/mmcif_files\n"
    path.write_text(TINY.replace("data:\n", "data:\n" + folders))
    return path


def words(config: Path, output: Path, *options: str, steps: int = STEPS) -> list[str]:
    return [
        "fit", f"--config={config}", f"--output={output}", f"--trainer.max_steps={steps}", f"--checkpoint_every={EVERY}",
        *options,
    ]  # fmt: skip


def losses(output: Path) -> dict[int, dict[str, str]]:
    """Everything in the curve but what is measured, and where a run was resumed."""
    return {
        step: {name: value for name, value in row.items() if name not in ("seconds", RESUMED, *MEASURED)}
        for step, row in read_curve(output / "curve.csv").items()
    }


def ranks_of(*starters: Started) -> dict[int, int]:
    """Pids of the ranks that launchers or agents have started, by rank."""
    found = {}
    for starter in starters:
        with contextlib.suppress(OSError):  # it has ended
            for pid in map(int, Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()):
                if rank := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
                    found[int(rank[1])] = pid
    return found


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def under_way(command: list[str], output: Path, times: int = 1) -> Iterator[tuple[list[Started], dict[int, int]]]:
    """A command, given on `times` machines, whose run has come past step KILLED_AFTER, and the pids of its ranks.

    Nothing of it is left afterwards.
    """
    processes = [begin(command) for _ in range(times)]
    try:
        deadline = time.monotonic() + PATIENCE_S
        while KILLED_AFTER not in losses(output):
            for process in processes:
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the run did not come that far"
            time.sleep(0.01)
        ranks = ranks_of(*processes)
        assert sorted(ranks) == [0, 1]
        yield processes, ranks
    finally:
        left = [*ranks_of(*processes).values(), *(process.pid for process in processes if process.poll() is None)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.communicate()


def evodsp(*words: str) -> list[str]:
    return [sys.executable, "-m", "evodsp", *words]


def assert_nothing_partial(output: Path) -> None:
    """Whole files only: a checkpoint cut short would be found when the run is to go on."""
    assert not [path.name for path in output.rglob("*") if "partial" in path.name or "tmp" in path.name]
