"""Several groups of ranks that empty one list of records: a group that is done with one takes the next.

Groups meet in the store of the run, not in collectives: a group may work for hours on a record, and a collective in which the
others waited for it would time out. Within a group the ranks compute together, as ever.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from evodsp.inference.run_log import Report
from evodsp.launch.consensus import from_first
from evodsp.parallel.group import Group

_POLL_S = 0.2

Result = TypeVar("Result")


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

    def again(self) -> Groups:
        """The same groups, for another list."""
        return Groups(self.everyone, self.own)

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


def share(costs: Sequence[int], work: Callable[[int, Report], Result], report: Report, groups: Groups) -> list[Result]:
    """What becomes of all items, in their order. The dearest are taken first, so that no group is left with one at the end.

    `costs`: of each item. `work`: does the item of this number, and reports lines. Rank 0 of all reports the lines of other
    groups when an item is done. All ranks call this, and get the same.
    """
    dearest_first = sorted(range(len(costs)), key=lambda item: -costs[item])
    is_first, found = groups.everyone.rank == 0, dict[int, Result]()

    def listen() -> None:
        for place, (number, lines, result) in groups.news():
            if number != groups.number:
                for line in (f"(group {number}) {lines[0]}", *lines[1:]):
                    report(line)
            found[dearest_first[place]] = result

    for place in groups.places(len(costs)):
        lines: list[str] = []
        result = work(dearest_first[place], report if is_first else lines.append)
        groups.finish(place, (groups.number, lines, result))
        if is_first:
            listen()
    while not groups.finished(len(costs)):
        if is_first:
            listen()
    if is_first:
        listen()
    return from_first(lambda: [found[item] for item in range(len(costs))], groups.everyone)
