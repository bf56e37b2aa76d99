"""The ranks among which one sample is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from evodsp.parallel.ledger import Ledger


@dataclass(frozen=True)
class Group:
    """The ranks among which one sample is spread."""

    handle: dist.ProcessGroup
    ledger: Ledger | None = None
    """Where collectives are entered; None: nowhere."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return dist.get_rank(self.handle)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.handle)
