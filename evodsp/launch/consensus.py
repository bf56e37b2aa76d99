"""Values that the ranks of a group share or compare before they compute together. All ranks call these in the same order.

Without this, ranks with different inputs hang or compute nonsense.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.errors import UserError
from evodsp.parallel.group import Group

T = TypeVar("T")


class Members:
    """Some ranks of a group, who send one another messages through it, one by one. A process group of their own would cost
    every rank of the run a split of its communicator.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        """`ranks`: their numbers in the group, this rank's among them."""
        self.group, self.ranks = group, ranks
        self.rank = ranks.index(group.rank)
        """This rank's number among the members."""


_WORD_EVERY_S = 1.0
"""Interval at which a rank that works long tells the others that it is still at it: far within any time-out."""


def from_first(make: Callable[[], T], group: Group | Members | None) -> T:
    """Call `make` on rank 0 and return its result on every rank (pickled on the way).

    A UserError of `make` is raised on every rank. `group`: None for one process, which then acts as rank 0.
    """
    if group is None:
        return make()
    sent: list[tuple[T | None, str | None]] = [(None, None)]
    error = None
    if group.rank == 0:
        try:
            sent = [(make(), None)]
        except UserError as raised:
            error, sent = raised, [(None, str(raised))]
    _broadcast(sent, group)
    value, message = sent[0]
    if message is not None:
        raise error or UserError(message)
    return value  # type: ignore[return-value]


def long_from_first(make: Callable[[], T], group: Group | None) -> T:
    """`from_first` for work that may take longer than ranks may wait for one another, such as a download.

    `make` runs in a thread of rank 0. Meanwhile rank 0 sends the others a word every second, so that no collective times out
    and the watch (`evodsp.launch.watch`) sees progress.
    """
    if group is None:
        return make()
    result = Future[T]()

    def work() -> None:
        try:
            result.set_result(make())
        except BaseException as error:  # raised in the main thread, which asks for the result
            result.set_exception(error)

    if group.rank == 0:
        threading.Thread(target=work, name="evodsp work", daemon=True).start()
    while from_first(lambda: bool(wait([result], _WORD_EVERY_S).not_done), group):
        pass
    return from_first(result.result, group)


def on_first(make: Callable[[], T], group: Group | None) -> T | None:
    """Call `make` on rank 0 and return its result there, None on other ranks. Its UserError is raised on every rank."""
    kept: list[T] = []
    from_first(lambda: kept.append(make()), group)
    return kept[0] if kept else None


def on_every(make: Callable[[], T], group: Group | None) -> T:
    """Call `make` on every rank and return its result there. If it raises UserError on some ranks, all ranks raise it, and it
    names the first of them and its host: a folder may be missing on one machine only.
    """
    own: UserError | None = None
    made: list[T] = []
    try:
        made.append(make())
    except UserError as error:
        own = error
    messages = all_of((socket.gethostname(), None if own is None else str(own)), group)
    failed = [(rank, host, text) for rank, (host, text) in enumerate(messages) if text is not None]
    if own is not None and len(failed) == len(messages):
        raise own
    if failed:
        rank, host, text = failed[0]
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"rank {rank} on {host}{others} of {len(messages)} ranks: {text}") from own
    return made[0]


def tensors_from_first(
    make: Callable[[], Mapping[str, Tensor]], device: torch.device, group: Group | None
) -> dict[str, Tensor]:
    """Rank 0's tensors by name, on every rank's host. Like `from_first`, but tensors are not pickled.

    `device`: the device of the group's communication. Tensors are brought there one at a time.
    """
    if group is None:
        return dict(make())
    tensors: dict[str, Tensor] = {}

    def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
        tensors.update({name: value.contiguous() for name, value in make().items()})
        return {name: (value.shape, value.dtype) for name, value in tensors.items()}

    for name, (shape, dtype) in from_first(shapes, group).items():
        moving = torch.empty(shape, dtype=dtype, device=device) if group.rank > 0 else tensors[name].to(device)
        dist.broadcast(moving, group=group.handle, group_src=0)
        if group.rank > 0:
            tensors[name] = moving.cpu()
    return tensors


def check_same(what: str, text: str, group: Group | None) -> None:
    """Raise UserError on every rank if the ranks hold different texts. `what`: a name for the text, such as 'command lines'."""
    texts = all_of(text, group)
    most_common, _ = Counter(texts).most_common(1)[0]
    if others := [rank for rank, text in enumerate(texts) if text != most_common]:
        there, here = _difference(texts[others[0]], most_common)
        raise UserError(
            f"the ranks were given different {what}: rank {others[0]} has {there}, rank {texts.index(most_common)} {here}; "
            "start all of them in the same way"
        )


def all_of(value: T, group: Group | Members | None) -> list[T]:
    """Every rank's value, by rank (pickled on the way)."""
    if group is None:
        return [value]
    if isinstance(group, Members):
        if group.rank > 0:
            dist.send_object_list([value], group=group.group.handle, group_dst=group.ranks[0])
        return from_first(lambda: [value, *_sent_by_others(group)], group)
    found: list[T | None] = [None] * group.size
    dist.all_gather_object(found, value, group=group.handle)
    return found  # type: ignore[return-value]


def _broadcast(held: list[Any], group: Group | Members) -> None:
    """Rank 0's `held` on every rank."""
    if isinstance(group, Group):
        dist.broadcast_object_list(held, group=group.handle, group_src=0)
    elif group.rank > 0:
        dist.recv_object_list(held, group=group.group.handle, group_src=group.ranks[0])
    else:
        for member in group.ranks[1:]:
            dist.send_object_list(held, group=group.group.handle, group_dst=member)


def _sent_by_others(members: Members) -> list[Any]:
    """On rank 0: what the other members send, in their order."""
    found: list[Any] = []
    for member in members.ranks[1:]:
        held = [None]
        dist.recv_object_list(held, group=members.group.handle, group_src=member)
        found += held
    return found


def _difference(one: str, other: str, around: int = 20) -> tuple[str, str]:
    """The parts of two texts around the first place where they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(same - around, 0)
    shown = ("'" + text[start : start + 3 * around] + "'" for text in (one, other))
    return next(shown), next(shown)
