"""One forward and backward pass of a small transformer by any method, as a function that `tests/ranks.py` can run on ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evodsp.rng import Draws
from scripts.paper.methods import Groups, method_named
from scripts.paper.transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class Case:
    """A model, and the shape of its latents."""

    config: TransformerConfig
    latents: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """What one rank found. `layers` and `ends`: (phase, kind, elements) of each collective, and how often it occurred."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    layers: Counter[tuple[str, str, int]]
    ends: Counter[tuple[str, str, int]]


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
    ledgers = [
        Counter((entry.phase, entry.kind, entry.elements) for entry in ledger.entries)
        for ledger in (groups.layer_ledger, groups.end_ledger)
    ]
    return Result(output.detach(), latents.grad / groups.size, method.gradients(parallel), *ledgers)
