"""Jobs in processes: what a job raises, or dies of, is told in the process that asked for it."""

from __future__ import annotations

import os
import signal

import pytest

from evodsp.data.pool import in_processes
from evodsp.errors import FileFormatError, UserError


def do(what: str, number: int) -> tuple[int, int]:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "mistake":
        raise FileFormatError("a.txt", "cut short", 3)
    if what == "disk":
        raise OSError(28, "No space left on device", "b.txt")
    return number, os.getpid()


def test_results_of_other_processes() -> None:
    """Catches a job that is lost or done twice, and one that is done here although processes were asked for."""
    done = list(in_processes(do, (("work", number) for number in range(9)), 2))
    assert sorted(number for number, _ in done) == list(range(9))
    assert os.getpid() not in {pid for _, pid in done}
    assert list(in_processes(do, [("work", 1)], 1)) == [(1, os.getpid())]


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("die", UserError, r"killed by SIGKILL \(out of memory\?\): run the command again with fewer --workers"),
        ("mistake", UserError, r"^a\.txt:3: cut short$"),
        ("disk", OSError, r"\[Errno 28\] No space left on device: 'b\.txt'"),
    ],
)
def test_what_ends_a_job_is_told(what: str, kind: type[Exception], said: str) -> None:
    """Catches an error that cannot be sent, such as one whose constructor takes other arguments, and a wait without end."""
    with pytest.raises(kind, match=said):
        list(in_processes(do, [("work", 1), (what, 2), ("work", 3)], 2))
