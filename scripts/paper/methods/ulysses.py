"""DeepSpeed-Ulysses: all-to-alls around the temporal attention, from sharded time to sharded heads and back.

Source: deepspeedai/DeepSpeed, deepspeed/sequence/layer.py, `DistributedAttention`: one all-to-all each for queries, keys and
values, a local attention over the whole sequence with 1/N of the heads, and one all-to-all for its output. (Later versions
also give ranks different numbers of heads, `uneven_heads_all2all`; the paper's comparison, and this one, do not.) The spatial
attention is local, because time is what is sharded.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from evodsp.parallel.collectives import Switch, shard_sizes
from evodsp.parallel.exchange import start
from evodsp.parallel.group import Group, Phase

from ..config import TransformerConfig
from ..transformer import Transformer
from .base import Counts, Groups, Parallel, must_divide
from .time_sharded import TIME, EmbeddedMethod, TimeSharded


class Ulysses(EmbeddedMethod):
    """DeepSpeed-Ulysses."""

    name, title = "ulysses", "DeepSpeed-Ulysses"

    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        self.check_model(model.config, groups.size)
        for block in model.blocks_along("time"):
            block.attention.core = DistributedAttention(block.attention.core, groups.layers)
        return TimeSharded(model, self, groups)

    def layer_traffic(self, phase: Phase) -> Counts:
        return {"all-to-all": 4}

    def check_model(self, config: TransformerConfig, ranks: int) -> None:
        must_divide(ranks, config.heads, "the number of heads", self.name)


class DistributedAttention(nn.Module):
    """Attention along the sharded time, computed by `local` for whole sequences and 1/N of the heads."""

    def __init__(self, local: nn.Module, group: Group) -> None:
        super().__init__()
        self.local, self.group = local, group

    def forward(
        self, q: Float[Tensor, "B *axes h d"], k: Float[Tensor, "B *axes h d"], v: Float[Tensor, "B *axes h d"]
    ) -> Float[Tensor, "B *axes h d"]:
        heads = q.ndim - 2
        time = (q.shape[TIME],) * self.group.size
        to_heads = Switch(self.group, TIME, heads, time, shard_sizes(q.shape[heads], self.group.size))
        # One after another, as the official code does without its optional stream.
        whole = [start(x, to_heads).wait() for x in (q, k, v)]
        return start(self.local(*whole), to_heads.transpose()).wait()
