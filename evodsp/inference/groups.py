"""Several groups of ranks that empty one list of records: a group that is done with one takes the next.

Groups meet in the store of the run, not in collectives: a group may work for hours on a record, and a collective in which the
others waited for it would time out. Within a group the ranks compute together, as ever.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from evodsp.launch.consensus import from_first
from evodsp.parallel.group import Group

_POLL_S = 0.2


class Groups:
    """One rank's view of the groups. All ranks make it together, and again for each run."""

    def __init__(self, everyone: Group, own: Group | None) -> None:
        """`everyone`: all ranks; groups are consecutive ranks of it, equally many. `own`: this rank's; None: it is alone."""
        self.everyone, self.own = everyone, own
        size = 1 if own is None else own.size
        self.number, self.count = everyone.rank // size, everyone.size // size
        """This group's number, and how many groups there are."""
        run = from_first(lambda: uuid.uuid4().hex, everyone)
        self._store = dist.PrefixStore(run, dist.distributed_c10d._get_default_store())
        self._read = 0

    def places(self, total: int) -> Iterator[int]:
        """Those of the places 0 … `total` - 1 that this group takes, one after another. All ranks of the group get the same."""
        while (place := from_first(lambda: self._store.add("taken", 1) - 1, self.own)) < total:
            yield place

    def finish(self, place: int, value: Any) -> None:
        """Hand in what became of a place. Called by every rank of the group."""
        if self.own is None or self.own.rank == 0:
            key = f"value/{self._store.add('handed_in', 1) - 1}"
            self._store.set(key, pickle.dumps((place, value)))  # type: ignore[arg-type]  # torch takes bytes as well
            self._store.add("finished", 1)

    def news(self) -> Iterator[tuple[int, Any]]:
        """What has been handed in since the last call, by any group."""
        for number in range(self._read, self._store.add("finished", 0)):
            self._read = number + 1
            yield pickle.loads(self._store.get(f"value/{number}"))  # of this run's own ranks

    def finished(self, total: int) -> bool:
        """Whether all `total` places have been handed in; waits a moment if not."""
        if self._store.add("finished", 0) >= total:
            return True
        time.sleep(_POLL_S)
        return False
