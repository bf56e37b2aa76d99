"""`compile: blocks`: what a run refuses, and a run compared with the same one uncompiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evodsp.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compile", "model"), "compile"),
        (("--compile", "blocks", "--plan.stream_bias", "true"), "set plan.stream_bias to false"),
        (("--compile", "blocks", "--data.train.crop_size", "null"), "set data.train.crop_size"),
        (
            ("--compile", "blocks", "--parallel.parameters", "fsdp2", "--model.optimizer.clip", "batch"),
            "replicate or zero1",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    """Catches a setting that is silently ignored, and one that ends in a traceback of torch after minutes."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run"), *options]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_compiler_is_one_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches torch's traceback on a machine without a C++ compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run"), "--compile", "blocks"]
    assert main(words) == 2
    assert "no-such-compiler is not found; install g++" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--trainer.max_steps", "3"),
        pytest.param(
            ("--trainer.max_steps", "3", "--trainer.precision", "bf16-mixed", "--model.evoformer.checkpoint", "true",
             "--model.extra_msa.checkpoint", "true"),
            marks=pytest.mark.verify,
        ),
    ],
)  # fmt: skip
def test_a_compiled_run_is_the_run(chains: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Catches a graph for each block or step, changed numbers, and other names in checkpoints.

    Three blocks of the Evoformer, one of the extra-MSA stack, recycling, dropout, the moving average. Each half of a block is
    one graph in passes with gradients, and one in recycled passes without.
    """
    command = [sys.executable, "-m", "tests.builders.compiled_training_program", str(chains), str(tmp_path)]
    command += ["--model.evoformer.blocks", "3", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    plain, compiled = found["plain"], found["compiled"]
    assert len(plain["loss"]) == 3
    tolerance = 1e-2 if "bf16-mixed" in options else 1e-4
    torch.testing.assert_close(compiled["loss"], plain["loss"], rtol=tolerance, atol=0)
    assert compiled["names"] == plain["names"]
    assert found["graphs"] <= 8 + 3  # those of the check at the start
