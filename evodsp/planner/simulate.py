"""The events of the whole model, from those of the reduced one, and how long they take on a device.

First the events between two collectives become one `Span`, with its time on a device. Then the segments that the reduced model
has once are repeated. Memory follows: what a segment holds when it ends is added once more for each repetition, and taken away
again in the backward pass.

Then three clocks run. The host launches operators, one after another. The device runs them in this order, each after its
launch. The link carries collectives in the order in which they begin, each after the operators before it. Where a result is
awaited, the device stands still until it is there: that time is exposed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from evodsp.parallel.group import Kind, Phase
from evodsp.planner.device import Device
from evodsp.planner.program import MADE_ONCE, Program, Repeat
from evodsp.planner.trace import Communication, Event, Operation, Segment, Wait


@dataclass(frozen=True, slots=True)
class Span:
    """Operators of one place, without a collective between them."""

    place: Segment
    phase: Phase
    operators: int | float
    """Number of operators that the host launches, in units of torch's: an own one takes less of the host's time."""
    launches: int
    seconds: float
    """Time on the device."""
    flops: int
    bytes: int
    before: int
    peak: int
    after: int
    """Bytes held before, at most, and after."""


Item = Span | Communication | Wait


def spans(events: Iterable[Event], device: Device, busy: int = 1, tf32: bool = False) -> list[Item]:
    """Merge consecutive operators of one place into one `Span`; collectives separate spans.

    The times are those of `device`, of which `busy` work at once. `tf32`: whether products of float32 are in TF32.
    """
    crowded = device.crowded(busy)
    items: list[Item] = []
    run: list[Operation] = []
    held = 0

    def close() -> None:
        nonlocal held
        if run:
            items.append(
                Span(
                    run[0].place,
                    run[0].phase,
                    sum(device.operators(work) for work in run),
                    sum(work.launches for work in run),
                    sum(crowded * device.seconds(work, tf32) for work in run),
                    sum(work.flops for work in run),
                    sum(work.bytes for work in run),
                    held,
                    max(held, *(work.live for work in run)),
                    run[-1].live,
                )
            )
            held = run[-1].live
            run.clear()

    for event in events:
        if isinstance(event, Operation):
            if run and (run[-1].place, run[-1].phase) != (event.place, event.phase):
                close()
            run.append(event)
        else:
            close()
            items.append(event)
    close()
    return items


def whole(items: list[Item], repeats: Iterable[Repeat]) -> list[Item]:
    """The items of the whole model."""
    result = items
    for repeat in repeats:
        for forward in (True, False):
            run = _run_of(result, (repeat.part, repeat.segment), forward)
            if run is not None:
                result = _repeated(result, *run, repeat.times)
    return result


def _run_of(items: list[Item], place: Segment, forward: bool) -> tuple[int, int] | None:
    """Range of the items of a segment, up to the first item of the next segment of the same part."""
    own = [n for n, item in enumerate(items) if item.place[0] == place[0] and (item.phase == "forward") == forward]
    inner = [n for n in own if items[n].place == place]
    if not inner:
        return None
    after = [n for n in own if n > inner[-1]]
    return inner[0], after[0] if after else inner[-1] + 1


def _repeated(items: list[Item], start: int, stop: int, times: int) -> list[Item]:
    """`items` with those from `start` to `stop` standing `times` times, collectives renumbered and memory carried on."""
    before, run, after = items[:start], items[start:stop], items[stop:]
    sent = [item.number for item in run if isinstance(item, Communication)]
    awaited = [item.number for item in run if isinstance(item, Wait)]
    incoming = [number for number in awaited if number not in sent]
    outgoing = [number for number in sent if number not in awaited]
    own = [item for item in run if isinstance(item, Span)]
    grown = own[-1].after - own[0].before if own else 0
    fresh = 1 + max((item.number for item in items if not isinstance(item, Span)), default=0)
    result, name = list(before), {number: number for number in incoming}
    for copy in range(times):
        if copy:
            # What the segment before this one sent arrives in this one.
            name |= {old: name.get(new, new) for old, new in zip(incoming, outgoing, strict=False)}
        for item in run:
            if isinstance(item, Communication):
                name[item.number] = fresh
                fresh += 1
            result.append(_moved(item, name, copy * grown))
    left = dict(zip(outgoing, incoming, strict=False)) if times == 0 else {old: name[old] for old in outgoing}
    result += [_moved(item, left, (times - 1) * grown) for item in after]
    return result


def _moved(item: Item, name: Mapping[int, int], held: int) -> Item:
    """An item with its collective renumbered, and with `held` more bytes of memory."""
    # By position: `replace` takes five times as long, and a plan moves 160,000 items.
    if isinstance(item, Span):
        return Span(
            item.place, item.phase, item.operators, item.launches, item.seconds, item.flops, item.bytes,
            item.before + held, item.peak + held, item.after + held,
        )  # fmt: skip
    number = name.get(item.number, item.number)
    if isinstance(item, Communication):
        return Communication(item.place, item.phase, number, item.kind, item.bytes, item.operators)
    return Wait(item.place, item.phase, number)


def segment(items: list[Item], place: Segment, forward: bool = True) -> list[Item]:
    """The items of one segment of a stack; none if there is no such segment."""
    run = _run_of(items, place, forward)
    return [] if run is None else items[slice(*run)]


def items_of(program: Program, device: Device, busy: int = 1, tf32: bool = False) -> list[Item]:
    """The items of the whole step of `program`, with times as in `spans`."""
    return whole(spans(program.events, device, busy, tf32), program.repeats)


def free_pass(items: Iterable[Item]) -> Iterator[Item]:
    """A further pass without gradients: the forward items without those of losses, and without what a sample has once."""
    return (item for item in items if item.phase == "forward" and item.place not in (("losses", 0), MADE_ONCE))


RECORDED = ("template_embedder", "extra_msa_stack", "evoformer", "structure_module", "losses")
"""Parts of the model that `cuda_graphs` records."""


def replayed(items: Iterable[Item]) -> Iterator[Item]:
    """The items of a run with `cuda_graphs`: the host launches no operators and no collectives of the stacks."""
    for item in items:
        if not isinstance(item, Wait) and item.place[0] in RECORDED:
            item = dataclasses.replace(item, operators=0)
        yield item


@dataclass
class Times:
    """Seconds of a sequence of items."""

    total: float = 0.0
    device: float = 0.0
    """Time of the operators by themselves."""
    host: float = 0.0
    """Time in which the host launches them."""
    communication: float = 0.0
    """Time of the collectives by themselves."""
    exposed: float = 0.0
    """Time in which the device stands still for collectives."""
    launches: int = 0
    calls: int = 0
    bytes: int = 0
    """Bytes of collectives, as the ledger counts them."""
    flops: int = 0
    by_part: dict[str, float] = field(default_factory=dict)
    """Seconds that pass in each part of the model."""
    by_kind: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of collective."""
    intervals: list[tuple[float, float, str]] = field(default_factory=list)
    """Intervals of the device or the link: begin, end, and `compute` or the kind of a collective."""


def simulate(
    items: Iterable[Item],
    launch_s: float,
    link: Callable[[Kind, int], float],
    overlaps: bool = True,
    keep_intervals: bool = False,
) -> Times:
    """Run `items`. `launch_s`: the host's time for one of torch's operators. `overlaps`: whether the link works while the
    device computes.

    `link`: seconds of a collective by kind and counted bytes.
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
                times.intervals.append((start, device, "compute"))
        elif isinstance(item, Communication):
            seconds = link(item.kind, item.bytes)
            host += item.operators * launch_s
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
                times.intervals.append((start, wire, item.kind))
        elif isinstance(item, Wait):
            ready = arrival.pop(item.number, 0.0)
            now = max(device, host)
            if ready > now:
                times.exposed += ready - now
                device = ready
        parts[item.place[0]] += max(host, device) - began  # type: ignore[assignment]
    times.total = max(host, device)
    times.by_part, times.by_kind = dict(parts), dict(kinds)
    return times
