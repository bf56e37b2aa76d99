"""A longer `evodsp fit` on experiments and a self-distillation set (supplement 1.3)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evodsp.data.samples.selection import precise_uniform
from evodsp.report.runs import read_curve
from evodsp.rng import Draws
from tests.builders.bad_chains import samples
from tests.builders.distillation_run import sources, write_sets
from tests.builders.processes import ROOT

STEPS = 80


@pytest.mark.verify
def test_80_steps_on_two_ranks(tmp_path: Path) -> None:
    """Another mix than 25/75, or one that depends on the mesh or changes on resume; residues that a prediction is unsure of,
    and that a term of the loss sees all the same."""
    config = write_sets(tmp_path)

    def run(name: str, steps: int, *options: str, callback: str = "RecordSource") -> None:
        words = ["fit", f"--config={config}", f"--output={tmp_path / name}", f"--trainer.max_steps={steps}",
                 f"--trainer.callbacks=tests.builders.distillation_run.{callback}", "--checkpoint_every=20",
                 f"--data.samples_per_epoch={STEPS}", "--data.train.uniform_recycling=false", *options]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "evodsp", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr

    run("whole", STEPS, "--parallel.sequence=2")
    seen, found = samples(tmp_path / "whole"), sources(tmp_path / "whole")
    assert sorted(seen) == sorted(found) == list(range(STEPS))
    assert samples(tmp_path / "whole", rank=1) == seen
    draws = Draws.root(0).at("data")
    for index, (is_predicted, unsure, atoms) in found.items():
        assert is_predicted == (precise_uniform(draws.at("source", index), 0) < 0.75)
        assert unsure == (0 if is_predicted else 1)
        assert atoms >= 4  # N, CA, C, O at least
    share = sum(is_predicted for is_predicted, *_ in found.values()) / STEPS
    assert abs(share - 0.75) < 3 * math.sqrt(0.75 * 0.25 / STEPS)

    # In parts, and with nonsense in the labels of what the predictions are unsure of.
    run("parts", STEPS // 2 + 10, "--parallel.sequence=2", callback="Poison")
    run("parts", STEPS, "--parallel.sequence=2", "--ckpt_path=last", callback="Poison")
    assert samples(tmp_path / "parts") == seen
    whole, parts = (read_curve(tmp_path / name / "curve.csv") for name in ("whole", "parts"))
    losses = {name for name in whole[0] if name.startswith("train/loss")} | {"train/backbone_fape"} & set(whole[0])
    assert [[whole[step][name] for name in losses] for step in range(STEPS)] == [
        [parts[step][name] for name in losses] for step in range(STEPS)
    ]

    run("data", STEPS // 2, "--trainer.devices=2")
    assert samples(tmp_path / "data") | samples(tmp_path / "data", rank=1) == seen
    print(f"{STEPS} steps: {share:.3f} of the samples are predictions")
