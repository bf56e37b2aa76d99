"""A mistake of the user under torchrun: it is printed once, and the ranks are not started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from evodsp.launch import agent
from tests.builders.processes import TORCHRUN, begin

WRAPPED = ["--no-python", "bash", "-c", f"{sys.executable} -m evodsp fitt; exit $?"]


@pytest.mark.parametrize(
    ("ranks", "program"), [(2, ["-m", "evodsp", "fitt"]), (1, WRAPPED)], ids=["direct", "through a script"]
)
def test_a_mistake_ends_torchrun(ranks: int, program: list[str]) -> None:
    """Catches three restarts that print the same line again, an exit code of 0, and a shell taken for torchrun."""
    process = begin([*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3", *program])
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    assert error.count("no command 'fitt'") == 1, error


@pytest.mark.parametrize(
    ("run", "used", "most"),
    [("evodsp", "0", "3"), ("some", "3", "3"), ("some", "0", "0"), ("some", "0", "3")],
    ids=["our launcher", "the last attempt", "no restarts", "a parent that is not torchrun"],
)
def test_no_other_process_is_ended(monkeypatch: pytest.MonkeyPatch, run: str, used: str, most: str) -> None:
    """Catches a signal to a shell, to SLURM's daemon, or to a torchrun that ends by itself and prints its own account."""
    sent: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    names = ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")
    variables = {f"TORCHELASTIC_{name}": value for name, value in zip(names, (run, used, most), strict=True)}
    if (run, used) != ("some", "0") or most == "0":
        monkeypatch.setattr(agent, "_agent", lambda: 1)
    agent.end_agent(variables)
    assert not sent


def test_a_process_that_is_not_yet_a_rank_does_not_count() -> None:
    """Catches a signal to torchrun while it starts a rank: it would forget that one, which then prints the same line again."""
    for environment, expected in (({}, False), ({"TORCHELASTIC_RUN_ID": "some"}, True)):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as child:
            assert child.pid in agent._children(os.getpid())
            assert agent._is_rank(child.pid) == expected
            child.communicate(b"\n")
    assert not agent._is_rank(child.pid)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m torch.distributed.run --nnodes 2 -m evodsp fit", True),
        ("/venv/bin/python -u -X faulthandler /venv/bin/torchrun evodsp", True),
        ("python train.py --launcher torchrun", False),
    ],
)
def test_torchrun_is_recognised(command: str, expected: bool) -> None:
    """Catches another program that has the word in its options."""
    assert agent._is_torchrun([word.encode() for word in command.split()]) == expected
