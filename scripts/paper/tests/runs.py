"""Forward and backward passes of a small transformer by any method: a function that `tests/ranks.py` runs on ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from evodsp.parallel.group import Ledger
from evodsp.rng import Draws
from scripts.paper.config import TransformerConfig
from scripts.paper.methods import METHODS, Groups, method_named, volume
from scripts.paper.transformer import Transformer

Traffic = Counter[tuple[str, str, Fraction]]
"""How often each (phase, kind, numbers moved) occurred."""


@dataclass(frozen=True)
class Case:
    """A model, and the shape of its latents."""

    config: TransformerConfig
    latents: tuple[int, ...]

    @property
    def sequence(self) -> int:
        """M: numbers of the tokens."""
        return self.latents[0] * prod(self.config.token_sizes(self.latents)) * self.config.width


@dataclass(frozen=True)
class Result:
    """What one rank found."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    layers: Traffic
    ends: Traffic


def model_of(config: TransformerConfig) -> Transformer:
    """A model with dense random parameters: zeros and ones would hide errors."""
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return model


def run_method(handle: Any, name: str, case: Case) -> Result:
    """Output, gradients and collectives of one method on the ranks of `handle`; dropout on if the configuration has it."""
    groups, method = Groups(handle), method_named(name)
    parallel = method.apply(model_of(case.config), groups)
    generator = torch.Generator().manual_seed(2)
    latents, weights = (torch.randn(case.latents, dtype=torch.float64, generator=generator) for _ in range(2))
    output = parallel(latents.requires_grad_(), Draws.root(3))
    (output.sin() * weights).sum().backward()
    assert latents.grad is not None
    torch.distributed.all_reduce(latents.grad, group=handle)
    traffic = traffic_of(groups.layer_ledger), traffic_of(groups.end_ledger)
    return Result(output.detach(), latents.grad / groups.size, method.gradients(parallel), *traffic)


def traffic_of(ledger: Ledger) -> Traffic:
    """The entries of a ledger, counted."""
    return Counter((entry.phase, entry.kind, Fraction(entry.elements)) for entry in ledger.entries)


def traffic_of_formulas(name: str, case: Case, ranks: int) -> Traffic:
    """What a method says that the layers communicate."""
    phases = ("forward", "recompute", "backward") if case.config.checkpoint else ("forward", "backward")
    return Counter(
        {
            (phase, kind, volume(kind, ranks) * case.sequence): count
            for phase in phases
            for kind, count in METHODS[name].model_traffic(phase, case.config.layers).items()
        }
    )
