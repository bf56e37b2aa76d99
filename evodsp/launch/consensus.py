"""What the ranks of a group have to agree on before they compute together: otherwise they hang, or mix up their data.

Everything here is called by all ranks of the group, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.errors import UserError
from evodsp.parallel.group import Group

T = TypeVar("T")


def from_first(make: Callable[[], T], group: Group | None) -> T:
    """What `make` gives on rank 0, which alone calls it, on every rank. It travels pickled.

    A UserError of `make` is raised on every rank. `group`: None for one process, which then is rank 0.
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
    dist.broadcast_object_list(sent, group=group.handle, group_src=0)
    value, message = sent[0]
    if message is not None:
        raise error or UserError(message)
    return value  # type: ignore[return-value]


def on_first(make: Callable[[], T], group: Group | None) -> T | None:
    """What `make` gives on rank 0, which alone calls it; None on the others. A UserError of `make` is raised on every rank."""
    kept: list[T] = []
    from_first(lambda: kept.append(make()), group)
    return kept[0] if kept else None


def tensors_from_first(
    make: Callable[[], Mapping[str, Tensor]], device: torch.device, group: Group | None
) -> dict[str, Tensor]:
    """Rank 0's tensors by name, on every rank's `device`. As `from_first`, but nothing is pickled."""
    if group is None:
        return {name: value.to(device) for name, value in make().items()}
    tensors: dict[str, Tensor] = {}

    def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
        tensors.update({name: value.to(device).contiguous() for name, value in make().items()})
        return {name: (value.shape, value.dtype) for name, value in tensors.items()}

    for name, (shape, dtype) in from_first(shapes, group).items():
        if group.rank > 0:
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensors[name], group=group.handle, group_src=0)
    return tensors


def check_same(what: str, mine: str, group: Group | None) -> None:
    """Raise UserError on every rank if they do not all hold the same text. `what`: such as 'command lines'."""
    if group is None:
        return
    texts = all_of(mine, group)
    usual, _ = Counter(texts).most_common(1)[0]
    if others := [rank for rank, text in enumerate(texts) if text != usual]:
        there, here = _difference(texts[others[0]], usual)
        raise UserError(
            f"the ranks were given different {what}: rank {others[0]} has {there}, rank {texts.index(usual)} {here}; "
            "start all of them alike"
        )


def all_of(mine: T, group: Group | None) -> list[T]:
    """Every rank's value, by rank. They travel pickled."""
    if group is None:
        return [mine]
    found: list[T | None] = [None] * group.size
    dist.all_gather_object(found, mine, group=group.handle)
    return found  # type: ignore[return-value]


def _difference(one: str, other: str, around: int = 20) -> tuple[str, str]:
    """The two texts from a little before where they differ to a little after."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(same - around, 0)
    shown = ("'" + text[start : start + 3 * around] + "'" for text in (one, other))
    return next(shown), next(shown)
