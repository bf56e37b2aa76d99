"""The communication of a stack: every collective of one rank, in the order of the forward pass.

The stack itself is run on shapes alone (the meta device), with an exchange that writes down each request and communicates
nothing. So the list cannot differ from the program, and it needs no process group: rank 17 of 512 takes a fraction of a second.
Tests compare the list with the ledger of real ranks, call by call, and its volumes with the closed formulas of the design.

Counting is the ledger's: an all-gather counts its output, a reduce-scatter and an all-to-all their local input, an all-reduce
twice its input; the part that a rank keeps for itself is included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.config import EvoformerConfig
from evodsp.model.evoformer import EvoformerStack, Stack
from evodsp.model.layers import MSARowAttention
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.collectives import Axis, Collective
from evodsp.parallel.exchange import KEPT, Pending, Ready, ShardedExchange
from evodsp.parallel.group import Kind, Place


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of one rank."""

    layer: str
    """The sub-layer that communicates; `switch m` and `switch z` move a representation between sub-layers of a block, and
    `switch m outside` moves it between blocks or before them."""
    kind: Kind
    elements: int
    """Elements counted in the forward pass."""
    backward: int
    """Elements counted for its transpose in the backward pass; 0 without a transpose."""


@dataclass(frozen=True)
class StackSizes:
    """The sizes on which volumes depend, the number of ranks, and the rank."""

    ranks: int
    rank: int
    batch: int
    sequences: int
    residues: int
    c_m: int
    c_z: int
    config: EvoformerConfig
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)


OUTSIDE = "switch m outside"
"""A switch of the MSA representation outside of the recomputed segments."""


def recomputed(calls: Sequence[CollectiveCall], plan: CommunicationPlan) -> list[CollectiveCall]:
    """The calls among a stack's `calls` that activation checkpointing launches again in the backward pass, once each.

    Results that the plan keeps are not communicated again, and a switch between blocks is not part of a recomputed segment.
    `stream_bias` recomputes its broadcasts a second time, within the recomputation; that is not counted here.
    """
    kept = KEPT if plan.keep_gathered else ()
    return [call for call in calls if call.layer != OUTSIDE and call.kind not in kept]


class RecordingExchange(ShardedExchange):
    """Records what one rank of a group would communicate. Results have the right shapes and no content."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(Place(rank, ranks))
        self.calls: list[CollectiveCall] = []
        self.layer: str | None = None
        """Name of the sub-layer that is running."""
        self.inside = False
        """Whether a part of a block is running."""

    def name_layers(self, stack: Stack) -> None:
        """Name each recorded call after its sub-layer. Sub-layers are the children of modules called `…_stack`."""
        for block in stack.blocks:
            for part in block.parts:
                self._during(part, "inside", True, False)
        for path, module in stack.named_modules():
            if path.rpartition(".")[0].endswith("_stack"):
                self._during(module, "layer", path.rpartition(".")[2], None)
            if isinstance(module, MSARowAttention):
                module.bias = self._named(module.bias, "row_attention")  # type: ignore[method-assign]

    def start_switch(self, x: Tensor, from_axis: Axis, to_axis: Axis, whole: int) -> Pending:
        if self.layer is not None:
            return super().start_switch(x, from_axis, to_axis, whole)
        self.layer = "switch z" if to_axis in ("i", "j") else "switch m" if self.inside else OUTSIDE
        pending = super().start_switch(x, from_axis, to_axis, whole)
        self.layer = None
        return pending

    def _launched(self, x: Tensor, collective: Collective, exact: bool) -> Pending:
        shape = collective.result_shape(x.shape)
        counted, backward = collective.volume(x.shape), collective.transpose().volume(shape)
        self.calls.append(CollectiveCall(self.layer or "", collective.kind, counted, backward))
        return Ready(x.new_empty(shape))

    def _named(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`call`, whose collectives are those of the sub-layer `name`."""

        def named(*arguments: Any) -> Any:
            self.layer = name
            result = call(*arguments)
            self.layer = None
            return result

        return named

    def _during(self, module: nn.Module, name: str, value: Any, otherwise: Any) -> None:
        """Let the attribute `name` be `value` while `module` runs, and `otherwise` after it."""
        module.register_forward_pre_hook(lambda *_: setattr(self, name, value))
        module.register_forward_hook(lambda *_: setattr(self, name, otherwise))


def evoformer_calls(n: StackSizes) -> list[CollectiveCall]:
    """The calls of the forward pass of an Evoformer stack of `n.config.blocks` blocks."""
    return _calls(n, extra=False)


def extra_msa_calls(n: StackSizes) -> list[CollectiveCall]:
    """The calls of the forward pass of an extra-MSA stack."""
    return _calls(n, extra=True)


def inner_block(n: StackSizes, extra: bool = False) -> list[CollectiveCall]:
    """The calls of one block that is neither the first nor the last of its stack. An Evoformer block has twelve."""
    three, two = (_calls(replace(n, config=replace(n.config, blocks=blocks)), extra) for blocks in (3, 2))
    before = sum(call.layer == OUTSIDE for call in three[:1])
    return three[before : before + len(three) - len(two)]


@torch.no_grad()
def _calls(n: StackSizes, extra: bool) -> list[CollectiveCall]:
    exchange = RecordingExchange(n.rank, n.ranks)
    with torch.device("meta"):
        stack = EvoformerStack(n.c_m, n.c_z, n.config, extra)
        use_exchange(stack, exchange, n.plan)
        exchange.name_layers(stack)
        m = exchange.shard(torch.empty(n.batch, n.sequences, n.residues, n.c_m), "seq")
        z = exchange.shard(torch.empty(n.batch, n.residues, n.residues, n.c_z), "j")
        stack(m, z, torch.empty(n.batch, n.sequences, n.residues), torch.empty(n.batch, n.residues, n.residues))
    return exchange.calls
