"""Ranks that die, stop or hang: the run ends within the stated time and names the rank at fault."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders.processes import TORCHRUN, begin, free_port

TIMEOUT = 4.0


def program(fault: str, victim: int, folder: Path) -> list[str]:
    """Arguments that start one rank of `tests/builders/rank_program.py`."""
    return ["-m", "tests.builders.rank_program", fault, str(victim), str(TIMEOUT), str(folder)]


def bare_ranks(number: int, fault: str, victim: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Ranks started without a launcher, so they must detect the failure themselves. Rank 0 hosts the store."""
    port = free_port()
    return [
        begin(
            [sys.executable, *program(fault, victim, folder)],
            RANK=rank, WORLD_SIZE=number, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(number)
    ]  # fmt: skip


def ended(ranks: list[subprocess.Popen[str]], victim: int) -> tuple[str, list[str], float]:
    """The victim's pid, the standard error of the other ranks, and the seconds from the fault to the last rank's end."""
    output, end_time = "", 0.0
    errors = []
    try:
        for rank, process in enumerate(ranks):
            if rank != victim:
                errors.append(process.communicate(timeout=60)[1])
                assert process.returncode == 3, errors[-1]
        end_time = time.time()
        ranks[victim].kill()
        output = ranks[victim].communicate(timeout=60)[0]
    finally:
        for process in ranks:
            process.kill()
    _, pid, fault_time = output.split()
    return pid, errors, end_time - float(fault_time)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.verify), 1])
def test_a_killed_rank_ends_the_others(tmp_path: Path, victim: int) -> None:
    """Catches ranks that wait for a dead one, and a traceback where one line is expected.

    5 s of the test are the ranks' grace period, in which a launcher would have ended them.
    """
    _, errors, seconds = ended(bare_ranks(3, "kill", victim, tmp_path), victim)
    assert seconds < 15
    output = "".join(errors)
    assert "Traceback" not in output
    assert re.search(r"lost contact with another rank|store, .* is gone|rank 1 .* sent no heartbeat", output), output


@pytest.mark.verify
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named(tmp_path: Path, victim: int) -> None:
    """Catches a rank stopped by SIGSTOP that goes unnoticed: its connections stay open, so no collective fails.

    Stopping rank 0 stops the store as well.
    """
    pid, errors, seconds = ended(bare_ranks(3, "stop", victim, tmp_path), victim)
    assert seconds < 2 * TIMEOUT + 5
    named = f"rank {victim} (pid {pid} on {socket.gethostname()})"
    what = "or its launcher, gave no answer for 4 s" if victim == 0 else "sent no heartbeat for"
    assert any(f"{named} {what}" in error for error in errors), errors


@pytest.mark.verify
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_hangs_in_its_own_code_is_named(tmp_path: Path, victim: int) -> None:
    """Catches a hung rank that is not named: its process is alive and sends heartbeats, but it launches no collective."""
    ranks = bare_ranks(3, "hang", victim, tmp_path)
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert all(process.returncode == 3 for process in ranks)
    named = f"rank {victim} (pid {ranks[victim].pid} on {socket.gethostname()}) launched no collective for 4 s"
    assert sum(named in error for error in errors) >= 1


@pytest.mark.verify
def test_torchrun_restarts_a_killed_rank(tmp_path: Path) -> None:
    """Catches a restart that reads the addresses of dead ranks, which are still in the agent's store."""
    process = begin([*TORCHRUN, "--nproc-per-node=3", "--max-restarts=1", *program("kill", 1, tmp_path)])
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert output.count("done, attempt later") == 3


@pytest.mark.verify
@pytest.mark.parametrize("fault", ["none", "kill"])
def test_torchrun_on_two_nodes(tmp_path: Path, fault: str) -> None:
    """Catches attempts told apart by restart counts: the counts of two agents differ after a rank of one was killed."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    nodes = [
        begin(
            [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", endpoint, "--local-addr=127.0.0.1",
             "--max-restarts=2", *program(fault, 1, tmp_path)]
        )
        for _ in range(2)
    ]  # fmt: skip
    found = [process.communicate(timeout=180) for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], found
    output = "".join(out for out, _ in found)
    expected = "first" if fault == "none" else "later"
    assert sorted(re.findall(r"rank (\d) done, attempt (\w+)", output)) == [(str(rank), expected) for rank in range(4)]


@pytest.mark.verify
def test_a_rank_that_never_comes_is_named() -> None:
    """Catches ranks that wait silently for a node that did not boot."""
    process = begin(
        [sys.executable, "-c", "from evodsp.launch.process_group import start; start('gloo', meeting_s=2.0)"],
        RANK=0, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
    )  # fmt: skip
    _, error = process.communicate(timeout=60)
    assert "of 3 ranks (WORLD_SIZE), rank 1, 2 did not arrive within 2 s" in error


@pytest.mark.verify
def test_an_interactive_step_says_that_its_tasks_wait() -> None:
    """Catches the shell of `srun -n 4 --pty`, whose other tasks have ended, in which evodsp says nothing for ten minutes."""
    variables = {
        "JOB_ID": 77,
        "STEP_ID": 0,
        "STEP_NUM_TASKS": 4,
        "PROCID": 0,
        "LOCALID": 0,
        "STEP_NODELIST": "localhost",
    }
    process = begin(
        [sys.executable, "-c", "from evodsp.launch import process_group as p; p._SAID_S = 0.5; p.start('gloo', meeting_s=2.0)"],
        MASTER_PORT=free_port(), **{f"SLURM_{name}": value for name, value in variables.items()},
    )  # fmt: skip
    _, error = process.communicate(timeout=60)
    first = error.splitlines()[0]
    assert first.startswith("evodsp: rank 0 waits for rank 1, 2, 3 of 4, as SLURM_STEP_NUM_TASKS says; ")
    assert "unset SLURM_STEP_NUM_TASKS" in first


def test_sigterm_to_the_launcher_ends_its_ranks() -> None:
    """Catches ranks that stay on the node after `scancel` ended the command that started them."""
    process = begin([sys.executable, "-c", LAUNCH])
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.verify
def test_further_sigterms_do_not_lose_a_checkpoint() -> None:
    """Catches a launcher that a second SIGTERM ends: its ranks then end as well, in the middle of saving, and the batch system
    takes the run for one that failed."""
    process = begin([sys.executable, "-c", LAUNCH.replace("import time; time.sleep(100)", SAVES)])
    assert process.stdout is not None
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    deadline = time.monotonic() + 60
    while not all(catches(pid, signal.SIGTERM) for pid in ranks):  # on a busy machine Python takes seconds to start
        assert time.monotonic() < deadline, "ranks did not begin"
        time.sleep(0.05)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.wait(timeout=60) == 75


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


SAVES = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), sys.exit(75))); time.sleep(100)"
)
"""A rank that takes longer to save than it takes to notice that its launcher is gone."""


@pytest.mark.verify
def test_sigkill_to_the_launcher_ends_its_ranks() -> None:
    """Orphans that keep the cores or GPUs after the launcher was killed, perhaps for want of memory."""
    process = begin([sys.executable, "-c", LAUNCH])
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait(timeout=60)
    deadline = time.monotonic() + 20
    try:
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline, "ranks outlived their launcher"
            time.sleep(0.1)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process runs. One that has ended may stay as a zombie if nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LAUNCH = """
import subprocess, sys, threading
from evodsp.launch import launcher
started, real = [], launcher._start
RANK = "from evodsp.launch.environment import end_with_launcher as f; f(); import time; time.sleep(100)"
class Patient(subprocess.Popen):
    def __init__(self, words, **options):
        super().__init__([sys.executable, "-c", RANK], **options)
        started.append(self.pid)
        if len(started) == 2:
            threading.Timer(0.5, lambda: print(*started, flush=True)).start()
launcher.subprocess.Popen = Patient
sys.exit(launcher.launch(2, []))
"""
