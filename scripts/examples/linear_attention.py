"""Triangle attention whose cost grows with the number of pairs, not with its product with the length: a sub-layer of one's own.

Each row of the pair representation (of `Ending`, each column) attends within itself, without a bias from the third edge, with
elu(q) + 1 and elu(k) + 1 in the place of the softmax (Katharopoulos et al., ICML 2020): sums over keys are formed once for all
queries. A rank has whole rows, so nothing is communicated.

    evodsp fit --config configs/quickstart.yaml --model.evoformer.layers '[row_attention, column_attention, msa_transition,
        outer_product_mean, triangle_outgoing, triangle_incoming, attention_starting=scripts.examples.linear_attention:Starting,
        attention_ending=scripts.examples.linear_attention:Ending, pair_transition]'

Shape legend: B batch, I J residues of the pair, one of them a shard, h heads, c d width of a head.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import elu

from evodsp.config import EvoformerConfig
from evodsp.model.primitives import LayerNorm, Linear, SubLayer, working_width
from evodsp.model.sharded import Sharded, Update
from evodsp.parallel.collectives import Axis


class Starting(SubLayer):
    """Linear attention within the rows of the pair representation."""

    takes: tuple[Axis, ...] = ("i",)
    shared_axis: Axis = "i"
    rows = 1
    """The axis along which the rows lie that do not need each other."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig) -> None:
        super().__init__()
        self.heads, width = config.pair_heads, config.pair_heads * config.pair_head_width
        self.norm, self.qkv = LayerNorm(c_z), Linear(c_z, 3 * width, bias=False, init="glorot", parts=3)
        self.gate, self.output = Linear(c_z, width, init="gate"), Linear(width, c_z, init="final")
        self.working_width = working_width(self)

    def forward(self, pair: Sharded) -> Update:
        return pair.update(self._attention, pair.x, pair.own_mask, width=self.working_width, dim=self.rows)

    def _attention(self, z: Float[Tensor, "B I J c_z"], mask: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J c_z"]:
        keys = 3 - self.rows
        z = self.norm(z)
        q, k, v = self.qkv(z).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = elu(q) + 1, (elu(k) + 1) * mask[..., None, None].to(k.dtype)
        values = torch.einsum("bijhc,bijhd->bihcd" if keys == 2 else "bijhc,bijhd->bjhcd", k, v).unsqueeze(keys)
        weights = (q * k.sum(keys, keepdim=True)).sum(-1, keepdim=True)
        o = (q.unsqueeze(-2) @ values).squeeze(-2) / (weights + 1e-6)
        return self.output(self.gate(z).sigmoid() * o.flatten(-2))


class Ending(Starting):
    """Linear attention within the columns."""

    takes, shared_axis, rows = ("j",), "j", 2
