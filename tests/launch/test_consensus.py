"""Work of one rank that the others wait for."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from evodsp.errors import UserError
from evodsp.launch import consensus
from evodsp.launch.consensus import long_from_first
from evodsp.launch.watch import _launched
from evodsp.parallel.group import Group
from tests.ranks import RankPool


def work_long(handle: Any, mistake: bool) -> tuple[Any, int, list[str]]:
    """What a rank gets from work that takes half a second, the collectives meanwhile, and where the work was done."""
    usual, consensus._WORD_EVERY_S = consensus._WORD_EVERY_S, 0.05
    places: list[str] = []

    def make() -> tuple[int, str]:
        places.append(threading.current_thread().name)
        time.sleep(0.5)
        if mistake:
            raise UserError("no such thing")
        return handle.rank(), "made"

    before = _launched()
    found: Any
    try:
        found = long_from_first(make, Group(handle))
    except UserError as error:
        found = str(error)
    finally:
        consensus._WORD_EVERY_S = usual  # the ranks serve other tests too
    return found, _launched() - before, places


@pytest.mark.parametrize(("mistake", "expected"), [(False, (0, "made")), (True, "no such thing")])
def test_ranks_hear_from_one_that_works_long(pool: RankPool, mistake: bool, expected: Any) -> None:
    """Catches a wait without a sign of life, which the watch or a collective's time-out would end, and a lost mistake."""
    (one, words, places), (other, _, elsewhere) = pool.run(2, work_long, mistake)
    assert one == other == expected
    assert places == ["evodsp work"]
    assert elsewhere == []
    assert words >= 5


def test_one_process_works_by_itself() -> None:
    """Catches a thread where nobody waits: Ctrl-C would not reach the work."""
    assert long_from_first(threading.current_thread, None) is threading.main_thread()
