"""Run one rank's program without the other ranks, for any number of ranks.

PyTorch's fake process group returns from each collective at once and leaves buffers unchanged. On the meta device tensors have
shapes but no memory, so any size can be counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from evodsp.parallel.group import Group, Ledger


@contextmanager
def fake_group(ranks: int, rank: int = 0, ledger: Ledger | None = None) -> Iterator[Group]:
    """A group of `ranks` ranks in which this process is number `rank`; the others do not exist."""
    former = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    sys.excepthook = former  # every new group adds its rank to the lines of tracebacks
    try:
        handle = dist.group.WORLD
        assert handle is not None  # created above
        # A batch of sends and receives asks for the backend of its tensors' device. torch registers none for meta tensors.
        backend = handle._get_backend(torch.device("cpu"))
        handle._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        yield Group(handle, ledger)
    finally:
        dist.destroy_process_group()
