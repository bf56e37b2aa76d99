"""A rank of `tests/launch/test_faults.py`. It runs all-reduces with the others; the victim fails at step 5.

    python -m tests.builders.rank_program FAULT VICTIM TIMEOUT FOLDER

The victim fails in the first attempt only. A file in FOLDER marks it, because restart counts differ between machines.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from evodsp.launch import process_group
from evodsp.launch.process_group import guarded, start, stop

process_group._GRACE_S = 1.0  # how long a rank leaves the first word to its launcher; nobody reads this program's


def main(fault: str, victim: str, timeout: str, folder: str) -> None:
    with guarded():
        start("gloo", float(timeout))
        x, rank, mark = torch.ones(3), dist.get_rank(), Path(folder) / "attempted"
        first = not mark.exists()
        dist.barrier()
        for step in range(20):
            if step == 5 and first and rank == int(victim):
                mark.touch()
                print(f"victim {os.getpid()} {time.time()}", flush=True)
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault == "hang":
                    time.sleep(1000)
            dist.all_reduce(x)
            x /= dist.get_world_size()
        stop()
    # One write, because the ranks share a pipe.
    sys.stdout.write(f"rank {rank} done, attempt {'first' if first else 'later'}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
