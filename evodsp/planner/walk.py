"""The events of the whole model in the order in which a device meets them, from those of the reduced one.

First the events between two collectives become one `Span`, with its time on a device. Then the segments that the reduced model
has once are repeated. Memory follows: what a segment holds when it ends is added once more for each repetition, and taken away
again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from evodsp.parallel.ledger import Kind
from evodsp.planner.program import Program, Repeat
from evodsp.planner.trace import Event, Phase, Place, Send, Work


@dataclass(frozen=True, slots=True)
class Span:
    """Operators of one place, without a collective between them."""

    place: Place
    phase: Phase
    operators: int
    """Of the host, which launches them."""
    launches: int
    seconds: float
    """On the device."""
    flops: int
    bytes: int
    before: int
    peak: int
    after: int
    """Bytes held before, at most, and after."""


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective begins."""

    place: Place
    phase: Phase
    number: int
    kind: Kind
    bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The result of a collective is awaited."""

    place: Place
    phase: Phase
    number: int


Item = Span | Communication | Wait


def spans(events: Iterable[Event], seconds: Callable[[Work], float]) -> list[Item]:
    """Events with the operators between two collectives of one place together. `seconds`: time of an operator on the device."""
    items: list[Item] = []
    run: list[Work] = []
    held = 0

    def close() -> None:
        nonlocal held
        if run:
            items.append(
                Span(
                    run[0].place,
                    run[0].phase,
                    len(run),
                    sum(work.launches for work in run),
                    sum(seconds(work) for work in run),
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
        if isinstance(event, Work):
            if run and (run[-1].place, run[-1].phase) != (event.place, event.phase):
                close()
            run.append(event)
            continue
        close()
        if isinstance(event, Send):
            items.append(Communication(event.place, event.phase, event.number, event.begun.kind, event.begun.bytes))
        else:
            items.append(Wait(event.place, event.phase, event.number))
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


def _run_of(items: list[Item], place: Place, forward: bool) -> tuple[int, int] | None:
    """Where the items of a segment begin and end, up to the first item of the next segment of the same part."""
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
    """An item with its collective renumbered, or with so much more memory held."""
    # By position: `replace` takes five times as long, and a plan moves 160,000 items.
    if isinstance(item, Span):
        return Span(
            item.place, item.phase, item.operators, item.launches, item.seconds, item.flops, item.bytes,
            item.before + held, item.peak + held, item.after + held,
        )  # fmt: skip
    number = name.get(item.number, item.number)
    if isinstance(item, Communication):
        return Communication(item.place, item.phase, number, item.kind, item.bytes)
    return Wait(item.place, item.phase, number)


def segment(items: list[Item], place: Place, forward: bool = True) -> list[Item]:
    """The items of one segment of a stack; none if there is no such segment."""
    run = _run_of(items, place, forward)
    return [] if run is None else items[slice(*run)]


def items_of(program: Program, seconds: Callable[[Work], float]) -> list[Item]:
    """The items of the whole step of `program`."""
    return whole(spans(program.events, seconds), program.repeats)


def forward_only(items: Iterable[Item]) -> Iterator[Item]:
    """A pass without gradients: the forward items without those of losses."""
    return (item for item in items if item.phase == "forward" and item.place[0] != "losses")
