"""A step of one rank of many, on tensors without memory: what it communicates, what it holds, and in which order.

Tensors of the meta device have shapes but no values. So every number here is counted at the paper's sizes, and nothing is
timed. Attention is PyTorch's fused operator, which keeps what FlashAttention keeps: its inputs, its output, and one number per
row and head.

`passes` counts: the fake process group (`scripts/benchmarks/fake_ranks.py`) lets one rank's program run without the others.
`follow` keeps the place of every operator and collective, as `evodsp plan` does, so that times can be calculated from the
figures of a device and its links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.parallel.group import Entry, Ledger
from evodsp.planner.trace import Event, ImaginedGroup, Operation, ProgramRecorder
from scripts.benchmarks.fake_ranks import fake_group
from scripts.benchmarks.peak_memory import PeakMemory

from .methods import Groups, method_named
from .methods.base import Parallel, RingGroup
from .transformer import Transformer
from .workload import Workload


@dataclass(frozen=True)
class Passes:
    """A forward and backward pass as the first rank sees it, which never holds less than another."""

    layers: list[Entry]
    """Collectives of the layers, from the ledger."""
    ends: list[Entry]
    """Collectives that enter and leave the layers."""
    sent_forward: int
    """Bytes that leave the rank in the forward pass, from the operators that PyTorch dispatched, not from the ledger."""
    sent_backward: int
    """Likewise in the backward pass, recomputation included."""
    saved: int
    """Bytes of tensors alive between the two passes: what is kept for the backward pass, and the output."""
    peak: int
    """Largest number of bytes of tensors alive at once. Parameters and their gradients do not count."""
    parameters: int
    """Numbers in this rank's parameters."""


def passes(method: str, workload: Workload, ranks: int, dtype: torch.dtype = torch.bfloat16) -> Passes:
    """Count one method. Raises UserError if it cannot spread this model over this number of ranks."""
    with fake_group(ranks) as group:
        groups, sent = Groups(group.handle), SentBytes(group.rank, ranks)
        with without_numbers(method, workload, ranks, groups, dtype) as (parallel, latents):
            with PeakMemory() as memory, sent:
                output = parallel(latents)
                saved, sent_forward = memory.current, sent.bytes
                output.sum().backward()
            numbers = sum(parameter.numel() for parameter in parallel.parameters())
    return Passes(
        _entries(groups.layer_ledger),
        _entries(groups.end_ledger),
        sent_forward,
        sent.bytes - sent_forward,
        saved,
        memory.peak,
        numbers,
    )


@dataclass(frozen=True)
class Followed:
    """What a rank does in a step."""

    events: list[Event]
    peak: int
    """Largest number of bytes of tensors alive at once. Parameters and their gradients do not count."""
    parameters: int
    """Numbers in this rank's parameters."""
    groups: ImaginedGroups


class ImaginedRing(ImaginedGroup, RingGroup):
    """A place in a group without processes, whose ranks also pass tensors on."""

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor], first_tag: int = 0) -> list[Any]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in sent)
        return [self.begin("send-receive", size)]


class ImaginedGroups(Groups):
    """The first rank's place, for the layers and for the model's ends."""

    def __init__(self, ranks: int, recorder: ProgramRecorder) -> None:
        self.layers = ImaginedRing(0, ranks, recorder, Ledger())
        self.ends = ImaginedGroup(0, ranks, recorder, Ledger())


def follow(method: str, workload: Workload, ranks: int, training: bool = True) -> Followed:
    """Follow a step of one method in bf16. Raises UserError if it cannot spread this model over this number of ranks."""
    recorder = ProgramRecorder()
    groups = ImaginedGroups(ranks, recorder)
    with without_numbers(method, workload, ranks, groups, torch.bfloat16) as (parallel, latents):
        with recorder, torch.set_grad_enabled(training):
            output = parallel(latents)
            if training:
                output.sum().backward()
        numbers = sum(parameter.numel() for parameter in parallel.parameters())
    peak = max(event.live for event in recorder.events if isinstance(event, Operation))
    return Followed(recorder.events, peak, numbers, groups)


@contextmanager
def without_numbers(
    method: str, workload: Workload, ranks: int, groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[Parallel, Tensor]]:
    """The method's model, with gradients, and its latents, on the meta device. Raises UserError as `Method.check` does."""
    how, config = method_named(method), workload.config
    how.check(config, (workload.time, workload.rows * workload.columns), ranks)
    with torch.device("meta"), default_dtype(dtype), fused_attention():
        parallel = how.apply(Transformer(config), groups)
        for parameter in parallel.parameters():
            parameter.grad = torch.zeros_like(parameter)
        yield parallel, torch.empty(workload.latents)


@contextmanager
def fused_attention() -> Iterator[None]:
    """On the meta device too: there PyTorch would run attention as it is written, with all scores in memory."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
        return out

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


class SentBytes(TorchDispatchMode):
    """Counts the bytes that leave this rank, by algorithms that move as few as possible.

    Of an all-to-all a rank sends all but its own part, of an all-gather or a reduce-scatter N - 1 shards, of an all-reduce as
    many as of a reduce-scatter and an all-gather.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.bytes = rank, ranks, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            self.bytes += self._sent(function.name().removeprefix("c10d::"), args)
        return function(*args, **(kwargs or {}))

    def _sent(self, operator: str, args: tuple[Any, ...]) -> int:
        match operator:
            case "alltoall_base_":
                sent, splits = args[1], args[4]
                own = splits[self.rank] * (sent[:1].numel() if len(sent) else 0)
                return (sent.numel() - own) * sent.element_size()
            case "_allgather_base_":
                return _bytes(args[0]) - _bytes(args[1])
            case "_reduce_scatter_base_":
                return _bytes(args[1]) - _bytes(args[0])
            case "allreduce_":
                return sum(2 * (self.ranks - 1) * _bytes(tensor) // self.ranks for tensor in args[0])
            case "send":
                return sum(map(_bytes, args[0]))
            case "recv_":
                return 0
        raise ValueError(f"{operator}: nothing here knows how many bytes it sends")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _entries(ledger: Ledger) -> list[Entry]:
    return list(ledger.entries)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this type."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
