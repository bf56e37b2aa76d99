"""One rank's program without the other ranks: PyTorch's fake process group, whose collectives return at once and leave buffers
as they are, for any number of ranks. On the meta device, where tensors have shapes and no memory, any size costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from evodsp.parallel.group import Group
from evodsp.parallel.ledger import Ledger


@contextmanager
def fake_group(ranks: int, rank: int = 0, ledger: Ledger | None = None) -> Iterator[Group]:
    """A group of `ranks` ranks, of which this process is number `rank` and the others do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        handle = dist.group.WORLD
        assert handle is not None  # it was made a line above
        yield Group(handle, ledger)
    finally:
        dist.destroy_process_group()
