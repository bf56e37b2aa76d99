"""The ranks among which one sample is sharded."""

from __future__ import annotations

import torch.distributed as dist

from evodsp.parallel.ledger import Ledger


class Group:
    """A process group, and the ledger in which its collectives are entered."""

    def __init__(self, handle: dist.ProcessGroup, ledger: Ledger | None = None) -> None:
        """`ledger`: None enters them nowhere."""
        self.handle, self.ledger = handle, ledger

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
