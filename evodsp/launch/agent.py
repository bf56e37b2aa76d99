"""Keeps torchrun from starting ranks again that have ended for good.

`torchrun --max-restarts` starts all ranks again whatever the exit code of one is. That is right for a rank that died. A mistake
of the user is the same after a restart, and a run that was asked to stop has stopped. torchrun's processes have no way to say
so; but SIGHUP ends torchrun itself, which then ends the other ranks of its machine. (SIGTERM does too, unless torchrun is
shielded from it, as in scripts/slurm/fit.sbatch.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from evodsp.launch.parent import launched_by_evodsp

_STARTING_S, _NOTED_S = 15.0, 0.5
"""How long torchrun may take to start its ranks, and to note one that runs."""
_MARK = b"TORCHELASTIC_RUN_ID="
"""In the environment of everything that torchrun starts, but not in its own."""


def end_agent(environment: Mapping[str, str] = os.environ) -> None:
    """End the torchrun that started this rank, if it would start the ranks again. Its exit code is 1.

    Does nothing under another launcher, or where there is no /proc to find torchrun in.
    """
    if launched_by_evodsp(environment):  # it starts ranks again only if they ask for it
        return
    if _restarts_left(environment) and (agent := _agent()) is not None:
        _wait_for_ranks(agent, int(environment.get("LOCAL_WORLD_SIZE", "1")))
        os.kill(agent, signal.SIGHUP)


def starts_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher of this rank starts all ranks again if it ends with exit code AGAIN."""
    return launched_by_evodsp(environment) or _restarts_left(environment)


def _restarts_left(environment: Mapping[str, str]) -> bool:
    used, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return used.isdecimal() and most.isdecimal() and int(used) < int(most)


def _wait_for_ranks(agent: int, ranks: int) -> None:
    """Wait until torchrun has started all of its ranks, `_STARTING_S` at most. It forgets one that it is just starting."""
    deadline = time.monotonic() + _STARTING_S
    while sum(map(_is_rank, _children(agent))) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(_NOTED_S)


def _is_rank(pid: int) -> bool:
    """Whether a process runs a program with a rank's environment. A copy of torchrun that is to become a rank does not."""
    try:
        return _MARK in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has just ended
        return False


def _children(pid: int) -> set[int]:
    """The processes that this one has started and that still run."""
    found = set[int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(file.parent.name))
    return found


def _agent() -> int | None:
    """The process id of torchrun: the nearest process above this one that torchrun has not started. None if it is gone."""
    pid = os.getppid()
    while pid > 0:
        folder = Path(f"/proc/{pid}")
        try:
            if _MARK not in (folder / "environ").read_bytes():
                return pid if _is_torchrun((folder / "cmdline").read_bytes().split(b"\0")) else None
            pid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])  # a wrapper: look at its parent
        except OSError:
            return None
    return None


def _is_torchrun(command: Sequence[bytes]) -> bool:
    """Whether it is `python [options] -m torch.distributed.run …` or `python …/torchrun …`."""
    for before, word in pairwise(command):
        if before == b"-m":
            return word.startswith(b"torch.distributed.")
        if not word.startswith(b"-") and before not in (b"-X", b"-W"):
            return os.path.basename(word) == b"torchrun"
    return False
