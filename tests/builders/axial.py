"""Small models whose modules mix positions along chosen dimensions; their parallel runs compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evodsp.parallel import Group, Ledger, average_gradients
from evodsp.parallel.testing import dense
from tests.builders.comparison import close

WIDTH = 4

Built = tuple[nn.Module, tuple[Tensor, ...]]
"""A model and its inputs."""


class Attention(nn.Module):
    """Self-attention over all positions of some dimensions of [..., C]."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims, self.projections, self.out = dims, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        last = tuple(range(-1 - len(self.dims), -1))
        moved = x.movedim(self.dims, last)
        q, k, v = self.projections(moved.flatten(last[0], -2)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)).view(moved.shape).movedim(last, self.dims)


class Layer(nn.Module):
    """Attention modules, with residual connections around them, and a layer norm after each."""

    def __init__(self, **stages: nn.Module) -> None:
        super().__init__()
        for name, stage in stages.items():
            self.add_module(name, stage)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for name, stage in self.named_children():
            if name != "norm":
                x = self.norm(x + stage(x))
        return x


def numbers(*shape: int) -> Tensor:
    """Random input of one model."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def built(model: nn.Module, *shapes: tuple[int, ...]) -> Built:
    """The model with random parameters, and inputs of these shapes."""
    return dense(model), tuple(numbers(*shape) for shape in shapes)


def outcome(model: nn.Module, inputs: tuple[Tensor, ...], handle: Any = None) -> dict[str, Tensor]:
    """Outputs, and the gradients of inputs and parameters; with `handle`, their means over its ranks."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = list(tensors(model(*inputs)))
    total(outputs).backward()
    found = {f"output {n}": y.detach() for n, y in enumerate(outputs)}
    if handle is not None:
        average_gradients([*inputs, *model.parameters()], handle)
    found |= {f"input {n}": x.grad for n, x in enumerate(inputs) if x.grad is not None}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def tensors(output: Any) -> Iterable[Tensor]:
    """The tensors of a model's output, one or nested in tuples and lists."""
    if isinstance(output, Tensor):
        yield output
    else:
        for item in output:
            yield from tensors(item)


def total(outputs: Iterable[Tensor]) -> Tensor:
    """A loss that weighs each number of the outputs differently."""
    return torch.stack([(y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in outputs]).sum()


def kinds(handle: Any, build: Callable[[], Built], parallel: Callable[[nn.Module, Any], Any]) -> list[str]:
    """The collectives of the forward pass on this rank, in order."""
    (model, inputs), ledger = build(), Ledger()
    parallel(model, Group(handle, ledger))
    model(*inputs)
    return [entry.kind for entry in ledger.of("forward")]


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Assert that two outcomes are the same up to rounding."""
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        close(found[name], value, f"{name} {where}")
