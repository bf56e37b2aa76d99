"""The progress of a prediction while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from evodsp.inference import seeds as module
from evodsp.inference.predict import predict
from tests.builders.prediction import silent

from .conftest import Workplace


@pytest.mark.parametrize("ensembles", [1, 2])
def test_every_block_of_every_pass_counts(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, ensembles: int
) -> None:
    """Catches blocks that are not counted, a total that is never reached, and hooks that stay for the next seed."""
    counted: list[list[int]] = []
    named: list[str] = []

    @contextmanager
    def watched(what: str, total: int) -> Iterator[object]:
        counted.append([total, 0])
        named.append(what)

        def advance(more: int) -> None:
            counted[-1][1] += more

        yield advance

    monkeypatch.setattr(module, "progress", watched)
    workplace.only("alpha_A")
    predict(workplace.change(recycles=1, seeds=2, ensembles=ensembles), silent)
    assert len(counted) == 2
    assert all(total == done > 0 for total, done in counted)
    assert named[1] == f"alpha_A, seed 1: blocks of {2 * ensembles} passes"


@pytest.mark.verify
def test_a_redirected_log_shows_lines_as_they_come(workplace: Workplace) -> None:
    """Catches a log file that stays empty until the run ends."""
    names = ("fasta", "alignments", "checkpoint", "output", "recycles", "device", "msa_clusters", "extra_msa")
    words = [f"--{name}={getattr(workplace.config, name)}" for name in names]
    log = workplace.root / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, "-m", "evodsp", "predict", *words, "--seeds=5000"]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            while process.poll() is None and "seed 0: model" not in log.read_text():
                time.sleep(0.1)
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()
            process.wait()
