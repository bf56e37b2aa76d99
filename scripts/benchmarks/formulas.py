"""FROZEN. The Evoformer, the extra-MSA stack and the template pair stack, formula by formula from AlphaFold2's supplement.

This is the baseline of `scripts/benchmarks/bench.py`. It is written as the algorithms are, one tensor per line of the
supplement, with torch's autograd and nothing else: no fused projections, no chunks, no recomputation. It is never tuned, and
never edited to change a ratio. A test compares it with evodsp's modules, whose parameters it copies.

Shape legend: b batch, s t sequences, i j k residues, h heads, c d e channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

INFINITE = 1e9
"""What is taken from the logits of keys that are masked."""


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of these parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def copied(layer: Any) -> nn.Linear:
    return linear(layer.weight, layer.bias)


def norm(layer: nn.LayerNorm) -> nn.LayerNorm:
    own = nn.LayerNorm(layer.normalized_shape).to(layer.weight)
    own.load_state_dict(layer.state_dict())
    return own


class Attention(nn.Module):
    """Lines 2 to 7 of algorithms 7, 8, 13 and 14: attention within each row of the second axis."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.heads = source.heads
        q, k, v = source.qkv.weight.chunk(3)
        self.q, self.k, self.v = linear(q), linear(k), linear(v)
        self.gate, self.output = copied(source.gate), copied(source.output)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [b, row, position, c], mask [b, row, position], bias [b, query, key, h]."""
        q, k, v, gate = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v, self.gate))
        logits = torch.einsum("brqhc,brkhc->brhqk", q / q.shape[-1] ** 0.5, k)
        logits = logits + ((mask - 1) * INFINITE)[:, :, None, None, :]
        if bias is not None:
            logits = logits + bias.permute(0, 3, 1, 2)[:, None]
        o = torch.einsum("brhqk,brkhc->brqhc", torch.softmax(logits, -1), v)
        return self.output((torch.sigmoid(gate) * o).flatten(-2))


class RowAttention(nn.Module):
    """Algorithm 7."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.norm, self.pair_norm, self.bias = norm(source.norm), norm(source.pair_norm), copied(source.pair_bias)
        self.attention = Attention(source.attention)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        return self.attention(self.norm(m), mask, self.bias(self.pair_norm(z)))


class ColumnAttention(nn.Module):
    """Algorithm 8."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.norm, self.attention = norm(source.norm), Attention(source.attention)

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        return self.attention(self.norm(m).transpose(1, 2), mask.transpose(1, 2)).transpose(1, 2)


class GlobalColumnAttention(nn.Module):
    """Algorithm 19."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.heads, self.norm = source.heads, norm(source.norm)
        k, v = source.key_value.weight.chunk(2)
        self.q, self.k, self.v = copied(source.query), linear(k), linear(v)
        self.gate, self.output = copied(source.gate), copied(source.output)

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        m = self.norm(m).transpose(1, 2)  # [b, i, s, c]
        mask = mask.transpose(1, 2)
        mean = (m * mask[..., None]).sum(2) / (mask.sum(2)[..., None] + 1e-10)
        q = self.q(mean).unflatten(-1, (self.heads, -1))
        k, v = self.k(m), self.v(m)
        gate = torch.sigmoid(self.gate(m)).unflatten(-1, (self.heads, -1))
        logits = torch.einsum("bihc,bisc->bihs", q / q.shape[-1] ** 0.5, k) + ((mask - 1) * INFINITE)[:, :, None]
        o = torch.einsum("bihs,bisc->bihc", torch.softmax(logits, -1), v)
        return self.output((gate * o[:, :, None]).flatten(-2)).transpose(1, 2)


class Transition(nn.Module):
    """Algorithms 9 and 15."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = norm(source.norm), copied(source.widen), copied(source.narrow)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.widen(self.norm(x))))


class OuterProductMean(nn.Module):
    """Algorithm 10."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        (a, b), (a_bias, b_bias) = source.left_right.weight.chunk(2), source.left_right.bias.chunk(2)
        self.norm, self.a, self.b = norm(source.norm), linear(a, a_bias), linear(b, b_bias)
        self.output = copied(source.output)

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        m = self.norm(m)
        a, b = self.a(m) * mask[..., None], self.b(m) * mask[..., None]
        o = self.output(torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2))
        return o / (torch.einsum("bsi,bsj->bij", mask, mask)[..., None] + 1e-3)


class TriangleMultiplication(nn.Module):
    """Algorithms 11 (outgoing edges) and 12 (incoming edges)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.outgoing = source.edges == "outgoing"
        (a, b), (a_bias, b_bias) = source.projection.weight.chunk(2), source.projection.bias.chunk(2)
        (c, d), (c_bias, d_bias) = source.projection_gate.weight.chunk(2), source.projection_gate.bias.chunk(2)
        self.a, self.b, self.a_gate, self.b_gate = (
            linear(*parameters) for parameters in ((a, a_bias), (b, b_bias), (c, c_bias), (d, d_bias))
        )
        self.norm, self.product_norm = norm(source.norm), norm(source.product_norm)
        self.gate, self.output = copied(source.output_gate), copied(source.output)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.norm(z)
        a = torch.sigmoid(self.a_gate(z)) * self.a(z) * mask[..., None]
        b = torch.sigmoid(self.b_gate(z)) * self.b(z) * mask[..., None]
        product = torch.einsum("bikc,bjkc->bijc" if self.outgoing else "bkjc,bkic->bijc", a, b)
        return torch.sigmoid(self.gate(z)) * self.output(self.product_norm(product))


class TriangleAttention(nn.Module):
    """Algorithms 13 (starting node) and 14 (ending node)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.ending = source.node == "ending"
        self.norm, self.bias, self.attention = norm(source.norm), copied(source.pair_bias), Attention(source.attention)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        if self.ending:
            z, mask = z.transpose(1, 2), mask.transpose(1, 2)
        z = self.norm(z)
        z = self.attention(z, mask, self.bias(z))
        return z.transpose(1, 2) if self.ending else z


class PairStack(nn.Module):
    """Algorithm 6, lines 6 to 10."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.outgoing = TriangleMultiplication(source.triangle_outgoing)
        self.incoming = TriangleMultiplication(source.triangle_incoming)
        self.starting = TriangleAttention(source.attention_starting)
        self.ending = TriangleAttention(source.attention_ending)
        self.transition = Transition(source.transition)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = z + self.outgoing(z, mask)
        z = z + self.incoming(z, mask)
        z = z + self.starting(z, mask)
        z = z + self.ending(z, mask)
        return z + self.transition(z)


class Block(nn.Module):
    """A block of the Evoformer (algorithm 6) or of the extra-MSA stack (algorithm 18), without dropout."""

    def __init__(self, source: Any) -> None:
        """`source`: evodsp's block, whose parameters are copied."""
        super().__init__()
        msa = source.msa_stack
        self.row, self.transition = RowAttention(msa.row_attention), Transition(msa.transition)
        self.column = (ColumnAttention if hasattr(msa.column_attention, "attention") else GlobalColumnAttention)(
            msa.column_attention
        )
        self.outer_product_mean, self.pair = OuterProductMean(msa.outer_product_mean), PairStack(source.pair_stack)

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        """m [b, s, i, c_m], z [b, i, j, c_z], msa_mask [b, s, i], pair_mask [b, i, j]."""
        m = m + self.row(m, z, msa_mask)
        m = m + self.column(m, msa_mask)
        m = m + self.transition(m)
        z = z + self.outer_product_mean(m, msa_mask)
        return m, self.pair(z, pair_mask)


class TemplatePairStack(nn.Module):
    """Algorithm 16, without dropout and without its last norm."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(PairStack(block) for block in source.blocks)

    def forward(self, t: Tensor, mask: Tensor) -> Tensor:
        """t [template, i, j, c], mask [template, i, j]."""
        for block in self.blocks:
            t = t + block.starting(t, mask)
            t = t + block.ending(t, mask)
            t = t + block.outgoing(t, mask)
            t = t + block.incoming(t, mask)
            t = t + block.transition(t)
        return t
