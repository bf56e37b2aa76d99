"""The training loop of scripts/examples/own_loop.py: which samples a rank reads, and Accelerate's part."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest
import torch

from scripts.examples import own_loop
from tests.builders.pages import ROOT

CPU = torch.device("cpu")


def test_ranks_share_the_samples() -> None:
    """Catches ranks that train on the same samples, and samples that depend on the number of ranks."""
    alone = dict(read for read in ((n[0], x) for n, x in islice(own_loop.batches(ROOT / "data", 0, 1, CPU), 4)))
    for rank in (0, 1):
        for (number,), batch in islice(own_loop.batches(ROOT / "data", rank, 2, CPU), 2):
            assert number % 2 == rank
            assert batch.keys() == alone[number].keys()
            assert all(torch.equal(x, alone[number][name]) for name, x in batch.items())


def test_accelerate_changes_nothing_in_one_process() -> None:
    """Catches a loop that does not train, and a backward pass or an optimizer that Accelerate does not see."""
    pytest.importorskip("accelerate")
    losses = own_loop.train(ROOT / "data", 2)
    assert own_loop.train(ROOT / "data", 2, accelerate=True) == losses
    assert own_loop.train(ROOT / "data", 1) == losses[:1]


@pytest.mark.verify
def test_two_ranks_average_their_gradients() -> None:
    """Catches ranks that go apart: the second loss of rank 0 depends on the gradient of rank 1."""
    pytest.importorskip("accelerate")
    ranks = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m"]
    words = ["scripts.examples.own_loop", "--steps", "2", "--accelerate", "true"]
    command = [sys.executable, "-m", *ranks, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    alone = own_loop.train(ROOT / "data", 2)
    assert found[0] == pytest.approx(alone[0], abs=0.006)
    assert abs(found[1] - alone[1]) > 0.01
