"""Where a training step makes the host wait for the GPU, with Lightning's loop, loggers and callbacks around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.host_waits_program import waits
from tests.ranks import in_a_fork

KEYS = "_to_copy model/dropout.py"
"""The copy of dropout's keys, from pinned memory on a GPU; a meta tensor's source is never pinned."""


@pytest.mark.verify_but("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_waits_once(chains: Path, tmp_path: Path, ranks: int) -> None:
    """Catches losses, a norm or a sample number read one by one, numbers that are copied to the device to be logged, a check of
    a value on the device, and Lightning's question before each batch of several ranks whether one of them got SIGTERM.

    The one wait is the copy of all losses and of the norm in `TrainingModule.on_before_optimizer_step`. Batches are compared
    over the ranks before they are on the device, and are copied there asynchronously. So are the keys of dropout, once a pass.
    """
    (step,) = in_a_fork(waits, ranks, chains, tmp_path)
    places = [wait.split(":")[0] for wait in step]
    assert [place for place in places if place != KEYS] == ["_to_copy training/module.py"]
