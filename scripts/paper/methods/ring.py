"""Ring Attention: keys and values go round the ranks, and each rank merges what its queries find in each shard.

Only the temporal attention communicates. Forward, a rank passes keys and values on N - 1 times, each time while it computes
with those that it holds; an online softmax merges the results. Backward, keys and values go round again, and the sums of their
gradients follow them for N hops, so that they end at the rank that owns the keys and values.

Source: zhuzilin/ring-flash-attention, ring_flash_attn/ring_flash_attn.py and utils.py (`RingComm`, `update_out_and_lse`). As
there, merging and the sums of gradients are in fp32 for activations in fp16 or bf16, so the rings of gradients carry fp32.

The paper's volume, 2M, counts the forward rings as an all-gather of keys and values. The ledger counts every ring so: N shards,
though those of keys and values make N - 1 hops. The rings of gradients make N hops: all of their count crosses the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.parallel.group import Phase

from ..transformer import AxisAttention, Transformer
from .attention_kernel import attend, attend_backward
from .base import Counts, Groups, Parallel, RingGroup
from .time_sharded import TIME, EmbeddedMethod, TimeSharded


class Ring(EmbeddedMethod):
    """Ring Attention with an online softmax."""

    name, title = "ring", "Ring Attention"

    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        self.check_model(model.config, groups.size)
        if groups.size > 1:
            for block in model.blocks_along("time"):
                block.attention.core = RingAttention(groups.layers)
        return TimeSharded(model, self, groups)

    def layer_traffic(self, phase: Phase) -> Counts:
        """Rings: of keys and of values, and backward of their gradients too."""
        return {"send-receive": 4 if phase == "backward" else 2}


class RingAttention(AxisAttention):
    """Attention along the sharded time."""

    def __init__(self, group: RingGroup) -> None:
        super().__init__(TIME)
        self.group = group

    def attend(
        self, q: Float[Tensor, "rows h L d"], k: Float[Tensor, "rows h L d"], v: Float[Tensor, "rows h L d"]
    ) -> Float[Tensor, "rows h L d"]:
        """Attention of this rank's L time steps to those of all ranks."""
        return _RingAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), self.group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: RingGroup) -> Tensor:
        shards: tuple[Tensor, ...] = (k, v)
        _record(group, shards, backward=False)
        total: Tensor | None = None
        for step in range(group.size):
            hop = Hop(shards, group) if step + 1 < group.size else None
            part, part_lse = attend(q, *shards)
            if total is None:
                total, lse = part.to(part_lse.dtype), part_lse
            else:
                merged = torch.logaddexp(lse, part_lse)
                total = total * (lse - merged).exp()[..., None] + part * (part_lse - merged).exp()[..., None]
                lse = merged
            if hop is not None:
                shards = hop.wait()
        assert total is not None
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        group, exact = ctx.group, lse.dtype
        shards: tuple[Tensor, ...] = (k, v)
        _record(group, shards, backward=True)
        to_queries = torch.zeros_like(q, dtype=exact)
        returning: Hop | None = None
        for step in range(group.size):
            hop = Hop(shards, group) if step + 1 < group.size else None
            to_q, to_k, to_v = attend_backward(gradient.contiguous(), q, shards[0], shards[1], out, lse)
            to_queries += to_q
            sums = to_k.to(exact), to_v.to(exact)
            if returning is not None:
                earlier_k, earlier_v = returning.wait()
                sums = sums[0] + earlier_k, sums[1] + earlier_v
            else:
                _record(group, sums, backward=True)
            if hop is not None:
                shards = hop.wait()
            returning = Hop(sums, group, first_tag=len(shards))
        assert returning is not None
        to_keys, to_values = (part.to(q.dtype) for part in returning.wait())
        return to_queries.to(q.dtype), to_keys, to_values, None


class Hop:
    """Tensors on their way from each rank to the next one."""

    def __init__(self, tensors: Sequence[Tensor], group: RingGroup, first_tag: int = 0) -> None:
        """`first_tag`: tells hops apart that are under way at the same time."""
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = tuple(torch.empty_like(tensor) for tensor in self._sent)
        self._works = group.pass_on(self._received, self._sent, first_tag)

    def wait(self) -> tuple[Tensor, ...]:
        """The previous rank's tensors."""
        for work in self._works:
            work.wait()
        return self._received


def _record(group: RingGroup, tensors: Sequence[Tensor], backward: bool) -> None:
    """Enter the rings of some tensors: each brings N shards past every rank."""
    if group.ledger is not None:
        for tensor in tensors:
            group.ledger.add("send-receive", group.size * tensor.numel(), tensor.element_size(), backward)
