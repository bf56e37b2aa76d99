"""The pool of ranks on which other tests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks

PROGRAM = "from tests.ranks import RankPool; from tests.test_rank_pool import hang; RankPool(2).run(2, hang)"


def hang(group: Any) -> None:
    """Rank 0 waits in a collective and rank 1 sleeps. Both ignore SIGTERM, as training does."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    sys.stdout.write(f"{os.getpid()}\n")  # one write, because the ranks share a pipe
    sys.stdout.flush()
    if torch.distributed.get_rank(group) == 1:
        time.sleep(1000)
    torch.distributed.barrier(group)


@pytest.mark.verify
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_a_test_run_that_is_killed(number: signal.Signals) -> None:
    """Catches ranks that outlive a killed test run (`timeout … pytest`) and keep a core busy."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    process.wait()
    try:
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def fail_on_rank_1(group: Any) -> None:
    """Rank 0 waits for rank 1."""
    if torch.distributed.get_rank(group) == 1:
        raise ValueError("planted")
    torch.distributed.barrier(group)


def test_a_failed_rank_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a test that fails after five minutes, and says that a rank gave no answer, because another one has failed."""
    monkeypatch.setattr(ranks, "AFTER_A_FAILURE", 0.5)
    pool = ranks.RankPool(2)
    with pytest.raises(ranks.RankError) as error:
        pool.run(2, fail_on_rank_1)
    assert list(error.value.traces) == [1]
    assert "planted" in error.value.traces[1]
