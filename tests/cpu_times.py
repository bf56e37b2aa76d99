"""A plugin of pytest that writes down the CPU seconds of each test, those of the processes that it starts included.

    CPU_TIMES=times.csv python -m pytest -p tests.cpu_times -n 0 -m "not verify"

Time on the clock says little on a machine with other work. A test that is the first to need something, such as the process that
ranks are forks of, pays for it.
"""

from __future__ import annotations

import csv
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """Of this process, and of all processes below it."""
    children, ticks = defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(int(folder.name))
        ticks[int(folder.name)] = sum(
            map(int, fields[11:15])
        )  # user and system, its own and of children that have ended
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children[process]
    return total / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    cpu, wall = cpu_seconds(), time.monotonic()
    try:
        return (yield)
    finally:
        with open(os.environ["CPU_TIMES"], "a", newline="") as file:
            csv.writer(file).writerow([item.nodeid, round(cpu_seconds() - cpu, 2), round(time.monotonic() - wall, 2)])
