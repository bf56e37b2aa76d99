"""One rank's program as the planner follows it: operators and collectives in their order, on tensors without numbers.

`one_rank.py` counts such a program; here every event keeps its place in the sequence, so that times can be calculated from a
device's and its links' figures. The planner is evodsp's own (`evodsp.planner`), as `evodsp plan` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evodsp.parallel.ledger import Ledger
from evodsp.planner.imagined import Begun, ImaginedGroup
from evodsp.planner.trace import Event, Recorder, Work

from .methods import Groups, method_named
from .methods.base import RingGroup
from .one_rank import default_dtype, fused_attention
from .transformer import Transformer
from .workload import Workload


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
        return [self.begin(Begun("send-receive", size))]


class ImaginedGroups(Groups):
    """The first rank's place, for the layers and for the model's ends."""

    def __init__(self, ranks: int, recorder: Recorder) -> None:
        self.layers = ImaginedRing(0, ranks, recorder.began, recorder.waited, Ledger())
        self.ends = ImaginedGroup(0, ranks, recorder.began, recorder.waited, Ledger())


def follow(method: str, workload: Workload, ranks: int, training: bool = True) -> Followed:
    """Follow a step of one method in bf16. Raises UserError if it cannot spread this model over this number of ranks."""
    how, config = method_named(method), workload.config
    how.check(config, (workload.time, workload.rows * workload.columns), ranks)
    recorder = Recorder()
    with torch.device("meta"), default_dtype(torch.bfloat16), fused_attention():
        groups = ImaginedGroups(ranks, recorder)
        parallel = how.apply(Transformer(config), groups)
        for parameter in parallel.parameters():
            parameter.grad = torch.zeros_like(parameter)
        latents = torch.empty(workload.latents)
        with recorder, torch.set_grad_enabled(training):
            output = parallel(latents)
            if training:
                output.sum().backward()
        numbers = sum(parameter.numel() for parameter in parallel.parameters())
    peak = max(event.live for event in recorder.events if isinstance(event, Work))
    return Followed(recorder.events, peak, numbers, groups)
