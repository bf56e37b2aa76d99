"""The ranks among which one sample is sharded."""

from __future__ import annotations

import torch.distributed as dist

from evodsp.parallel.ledger import Ledger
from evodsp.parallel.waits import WaitTimes


class Group:
    """A process group, the ledger in which its collectives are entered, and the clock that measures waits for them."""

    def __init__(self, handle: dist.ProcessGroup, ledger: Ledger | None = None, waits: WaitTimes | None = None) -> None:
        """`ledger`: None enters them nowhere. `waits`: None measures nothing."""
        self.handle, self.ledger, self.waits = handle, ledger, waits

    @property
    def name(self) -> str:
        """The name under which operators of a compiled graph find the process group."""
        return self.handle.group_name

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.handle)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.handle)
