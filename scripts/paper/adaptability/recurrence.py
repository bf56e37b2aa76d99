"""Recurrences along one dimension of [B, T, S, C]: a selective state-space model, linear attention with decay, a convolution.

Shape legend: B batch, T time, S space, C channels, L positions along the dimension, M states of a channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def scan(decay: Float[Tensor, "*N L D"], x: Float[Tensor, "*N L D"]) -> Float[Tensor, "*N L D"]:
    """h[t] = decay[t] * h[t-1] + x[t], with h[-1] = 0, for all t.

    Windows of 1, 2, 4, … positions are combined, so log2(L) steps are enough (Hillis and Steele, 1986). It is exact.
    """
    width = 1
    while width < x.shape[-2]:
        x = x + decay * delayed(x, width)
        decay = decay * delayed(
            decay, width
        )  # a window that begins before position 0 meets no state there: 0 is as good as 1
        width *= 2
    return x


def delayed(x: Float[Tensor, "*N L D"], by: int, before: float = 0.0) -> Float[Tensor, "*N L D"]:
    """x[t - by], and `before` where that lies before the beginning."""
    by = min(by, x.shape[-2])
    return F.pad(x[..., : x.shape[-2] - by, :], (0, 0, by, 0), value=before)


class DepthwiseConvolution(nn.Module):
    """A convolution of each channel with its own weights. `causal`: a position sees itself and those before it."""

    def __init__(self, width: int, size: int, dim: int, causal: bool = False) -> None:
        super().__init__()
        self.dim, self.before, self.after = dim, size - 1 if causal else size // 2, 0 if causal else (size - 1) // 2
        self.weight, self.bias = nn.Parameter(torch.randn(width, 1, size) / size), nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "B T S C"]) -> Float[Tensor, "B T S C"]:
        sequences = x.movedim(self.dim, -1)  # [B, rest, C, L]
        padded = F.pad(sequences.flatten(0, 1), (self.before, self.after))
        y = F.conv1d(padded, self.weight, self.bias, groups=len(self.bias))
        return y.view(sequences.shape).movedim(-1, self.dim)


class SelectiveScan(nn.Module):
    """A state-space model whose step size, input and output weights depend on the position's input: Mamba's layer.

    Gu and Dao, arXiv 2312.00752, algorithm 2, and selective_scan_ref in mamba_ssm/ops/selective_scan_interface.py of
    state-spaces/mamba: h[t] = exp(step[t] A) h[t-1] + step[t] B[t] u[t], and y[t] = C[t] h[t] + D u[t].
    """

    def __init__(self, width: int, states: int, dim: int) -> None:
        super().__init__()
        self.dim, self.sizes = dim, (width, states, states)
        self.inner, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.convolution = DepthwiseConvolution(width, 4, dim=2, causal=True)
        self.select = nn.Linear(width, sum(self.sizes))
        self.rates = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))  # log(-A), [C, M]
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "B T S C"]) -> Float[Tensor, "B T S C"]:
        u, gate = self.inner(x.movedim(self.dim, -2)).chunk(2, -1)  # [B, rest, L, C]
        u = F.silu(self.convolution(u))
        step, into, out_of = self.select(u).split(self.sizes, -1)
        step = F.softplus(step)
        decay = torch.exp(-step.unsqueeze(-1) * self.rates.exp())  # [B, rest, L, C, M]
        inputs = (step * u).unsqueeze(-1) * into.unsqueeze(-2)
        states = scan(decay.flatten(-2), inputs.flatten(-2)).view(inputs.shape)
        y = (states * out_of.unsqueeze(-2)).sum(-1) + self.skip * u
        return self.out(y * F.silu(gate)).movedim(-2, self.dim)


class Weighted(NamedTuple):
    """Sums of weighted values and of weights, both to be multiplied by exp(exponent), which may be too large to compute."""

    exponent: Float[Tensor, "*N L C"]
    values: Float[Tensor, "*N L C"]
    weights: Float[Tensor, "*N L C"]

    def plus(self, other: Weighted) -> Weighted:
        top = torch.maximum(self.exponent, other.exponent).detach()  # any number would do
        mine, its = (self.exponent - top).exp(), (other.exponent - top).exp()
        values, weights = mine * self.values + its * other.values, mine * self.weights + its * other.weights
        return Weighted(top, values, weights)

    def delayed(self, by: int, decay: Float[Tensor, " C"]) -> Weighted:
        """The sums `by` positions before, times exp(-decay)."""
        exponent = delayed(self.exponent, by, before=-torch.inf) - decay
        return Weighted(exponent, delayed(self.values, by), delayed(self.weights, by))


class TimeMixing(nn.Module):
    """Linear attention with a decay for each channel, after a mixture of each position with the one before it: RWKV's layer.

    Peng et al., arXiv 2305.13048, and RWKV-v4/src/model.py and cuda/wkv_cuda.cu of BlinkDL/RWKV-LM: position t reads the mean
    of the values before it, i < t, with weights exp(k[i] - (t-1-i) decay), and of its own with weight exp(bonus + k[t]).
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        # Shares of this position in mixtures with the one before it, for keys, values and gates.
        self.mixtures = nn.Parameter(torch.rand(3, width))
        self.keys, self.values, self.gates, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.decay, self.bonus = nn.Parameter(torch.linspace(-5, 3, width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "B T S C"]) -> Float[Tensor, "B T S C"]:
        x = x.movedim(self.dim, -2)  # [B, rest, L, C]
        for_keys, for_values, for_gates = (torch.lerp(delayed(x, 1), x, mixture) for mixture in self.mixtures)
        keys, values = self.keys(for_keys), self.values(for_values)
        decay, ones, width = self.decay.exp(), torch.ones_like(values), 1
        past = Weighted(keys, values, ones)
        while width < x.shape[-2]:  # windows of 1, 2, 4, … positions, as in `scan`
            past = past.plus(past.delayed(width, width * decay))
            width *= 2
        read = Weighted(keys + self.bonus, values, ones).plus(past.delayed(1, torch.zeros_like(decay)))
        return self.out(self.gates(for_gates).sigmoid() * read.values / read.weights).movedim(-2, self.dim)
