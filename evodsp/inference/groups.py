"""Several groups of ranks that empty one list of records: a group that is done with one takes the next.

Groups meet in the store of the run, not in collectives: a group may work for hours on a record, and a collective in which
the others waited for it would time out. Within a group the ranks compute together, as ever. The store holds counts and the
lines of reports only, because others may write into it (`evodsp.launch.watch`); results are gathered when all records are
done.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from evodsp.inference.results import Report
from evodsp.launch.consensus import all_of, from_first
from evodsp.launch.watch import foreign, set_texts, texts
from evodsp.parallel.group import Group

_POLL_S = 0.2

Result = TypeVar("Result")


class Groups:
    """One rank's view of the groups. All ranks make it together, and again for each run."""

    def __init__(self, everyone: Group, own: Group | None) -> None:
        """`everyone`: all ranks; each group has equally many consecutive ranks of it. `own`: the group of this rank; None: it
        is alone."""
        self.everyone, self.own = everyone, own
        size = 1 if own is None else own.size
        self.number, self.count = everyone.rank // size, everyone.size // size
        """This group's number, and how many groups there are."""
        run = from_first(lambda: uuid.uuid4().hex, everyone)
        self._leads = own is None or own.rank == 0
        self._store = dist.PrefixStore(run, dist.distributed_c10d._get_default_store())
        self._read = [0] * self.count

    def again(self) -> Groups:
        """The same groups, for another list."""
        return Groups(self.everyone, self.own)

    def places(self, total: int) -> Iterator[int]:
        """The places from 0 to `total` - 1 that this group takes, one after another. All ranks of the group get the same."""
        while (place := from_first(self._take, self.own)) < total:
            yield place

    def _take(self) -> int:
        place = self._store.add("taken", 1) - 1
        if place < 0:
            raise foreign(self._store, "taken", str(place + 1), "a number above 0")
        return place

    def finish(self, lines: Sequence[str]) -> None:
        """Tell the other groups that a place is done, and the `lines` that were reported of it. Every rank of the group calls
        this."""
        if self._leads:
            set_texts(self._store, f"said/{self.number}/{self._store.add(f'said/{self.number}', 0)}", lines)
            self._store.add(f"said/{self.number}", 1)
            self._store.add("finished", 1)

    def news(self) -> Iterator[tuple[int, list[str]]]:
        """The lines of each place that is done since the last call, and the number of its group. Raises UserError for others'
        values in the store."""
        for group in range(self.count):
            for number in range(self._read[group], self._store.add(f"said/{group}", 0)):
                self._read[group] = number + 1
                yield group, texts(self._store, f"said/{group}/{number}")

    def finished(self, total: int) -> bool:
        """Whether all `total` places are done; waits a moment if not."""
        if self._store.add("finished", 0) >= total:
            return True
        time.sleep(_POLL_S)
        return False

    def gathered(self, found: Mapping[int, Result], total: int) -> dict[int, Result]:
        """The results that all groups have `found` for `total` records, by number. All ranks call this, when all records are
        done."""
        parts = all_of(found if self._leads else {}, self.everyone)
        results = {number: result for part in parts for number, result in part.items()}
        if lost := total - len(results):
            raise foreign(self._store, "taken", f"{lost:,} more than groups have taken", "what groups have taken")
        return results


def share(
    costs: Sequence[int], work: Callable[[int, Report, Sequence[int]], Result], report: Report, groups: Groups
) -> list[Result]:
    """The results of all items, in their order. The dearest item is taken first, so that no group is left with one at the end.

    `costs`: the cost of each item. `work`: a function that does the item of a number, and reports lines; it is also given the
    numbers of the items that have been taken so far, its own included. Rank 0 of all
    reports the lines of other groups when an item is done. All ranks call this, and get the same.
    """
    dearest_first = sorted(range(len(costs)), key=lambda item: -costs[item])
    is_first, found = groups.everyone.rank == 0, dict[int, Result]()

    def listen() -> None:
        for number, lines in groups.news():
            if number != groups.number and lines:
                for line in (f"(group {number}) {lines[0]}", *lines[1:]):
                    report(line)

    for place in groups.places(len(costs)):
        lines: list[str] = []
        say = report if is_first else lines.append
        found[dearest_first[place]] = work(dearest_first[place], say, dearest_first[: place + 1])
        groups.finish(lines)
        if is_first:
            listen()
    while not groups.finished(len(costs)):
        if is_first:
            listen()
    if is_first:
        listen()
    results = groups.gathered(found, len(costs))
    return [results[item] for item in range(len(costs))]
