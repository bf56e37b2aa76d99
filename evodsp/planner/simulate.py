"""How long items take on a device, and how much of the communication is exposed.

Three clocks run. The host launches operators, one after another. The device runs them in this order, each after its launch. The
link carries collectives in the order in which they begin, each after the operators before it. Where a result is awaited, the
device stands still until it is there: that time is exposed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from evodsp.parallel.ledger import Kind
from evodsp.planner.trace import Phase, Place
from evodsp.planner.walk import Communication, Item, Span, Wait


@dataclass
class Interval:
    """What the device or the link does for a while."""

    place: Place
    phase: Phase
    what: str
    """`compute`, `wait`, or the kind of a collective."""
    begin: float
    end: float


@dataclass
class Times:
    """Seconds of a sequence of items."""

    total: float = 0.0
    device: float = 0.0
    """Of the operators by themselves."""
    host: float = 0.0
    """Of launching them."""
    communication: float = 0.0
    """Of the collectives by themselves."""
    exposed: float = 0.0
    """Of the device standing still for collectives."""
    launches: int = 0
    calls: int = 0
    bytes: int = 0
    """Of collectives, as the ledger counts them."""
    flops: int = 0
    by_part: dict[str, float] = field(default_factory=dict)
    """Seconds that pass in each part of the model."""
    by_kind: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of collective."""
    intervals: list[Interval] = field(default_factory=list)


def simulate(
    items: Iterable[Item],
    launch_s: float,
    link: Callable[[Kind, int], float],
    overlaps: bool = True,
    keep_intervals: bool = False,
) -> Times:
    """Run `items`. `launch_s`: the host's time for an operator. `link`: seconds of a collective by kind and counted bytes.

    `overlaps`: whether the link works while the device computes.
    """
    times = Times()
    host = device = wire = 0.0
    arrival: dict[int, float] = {}
    parts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for item in items:
        began = max(host, device)
        if isinstance(item, Span):
            first = host + launch_s
            host += item.operators * launch_s
            start = max(device, first)
            device = max(start + item.seconds, host)
            times.device += item.seconds
            times.host += item.operators * launch_s
            times.launches += item.launches
            times.flops += item.flops
            if keep_intervals:
                times.intervals.append(Interval(item.place, item.phase, "compute", start, device))
        elif isinstance(item, Communication):
            seconds = link(item.kind, item.bytes)
            host += launch_s
            start = max(wire, device, host)
            wire = start + seconds
            arrival[item.number] = wire
            if not overlaps:  # the processor that computes does the communication
                device = max(device, wire)
                times.exposed += seconds
            times.communication += seconds
            times.calls += 1
            times.bytes += item.bytes
            kinds[item.kind] += item.bytes
            if keep_intervals:
                times.intervals.append(Interval(item.place, item.phase, item.kind, start, wire))
        elif isinstance(item, Wait):
            ready = arrival.pop(item.number, 0.0)
            now = max(device, host)
            if ready > now:
                times.exposed += ready - now
                if keep_intervals:
                    times.intervals.append(Interval(item.place, item.phase, "wait", now, ready))
                device = ready
        parts[item.place[0]] += max(host, device) - began  # type: ignore[assignment]
    times.total = max(host, device)
    times.by_part, times.by_kind = dict(parts), dict(kinds)
    return times
