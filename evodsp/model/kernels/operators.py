"""The operators of which there are several implementations: each is declared once, in the table `OPERATORS`.

A new operator is its formula in `reference`, its entry here, its field of `KernelsConfig` and a function in `chunked`, which
may be the formula itself. A new backend of an operator is a function of that name in the backend's module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evodsp.model.kernels import chunked, reference
from evodsp.parallel.exchange import added_softmax_sums

Operator = Callable[..., Any]
"""Returns a tensor or several."""


class Inputs:
    """Makes the tensors of an example, always the same ones."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def mask(self, *shape: int) -> Tensor:
        """Ones, and some zeros."""
        return (torch.rand(shape, generator=self._generator) > 0.2).to(self._device, self._dtype)

    def keys(self) -> Tensor:
        """The keys of two random streams, whose words differ."""
        return torch.tensor([0x0123456789ABCDEF, -0x0123456789ABCDEF], device=self._device)


def _plainly(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    return function(*tensors, **settings)


@dataclass(frozen=True)
class Spec:
    """One operator: what it computes, and how an implementation is compared with that."""

    formula: Operator
    examples: Callable[[Inputs], list[Tensor]]
    """Small inputs: sizes that differ and do not divide, some keys masked, strides as in the model."""
    mask: int | None = None
    """Number of the input that is a mask, keys to draw it from, or counts, and gets no gradient."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments besides tensors."""
    call_with: Callable[[Operator, Sequence[Tensor], Mapping[str, Any]], Any] = _plainly
    """How an implementation is called with tensors as `examples` gives them."""

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The tensors of the example."""
        return self.examples(Inputs(device, dtype))

    def call(self, function: Operator, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results of an implementation for such tensors."""
        result = self.call_with(function, tensors, self.settings)
        return result if isinstance(result, tuple) else (result,)


def _heads(make: Inputs) -> list[Tensor]:
    rows, length, heads, width = 5, 37, 3, 16
    keys = make.mask(2, rows, length)
    keys[0, 0] = 0  # a row without keys
    return [make.random(2, length, rows, 4, heads, width).transpose(1, 2), keys]  # as for columns


def _operands(make: Inputs) -> list[Tensor]:
    norm = [make.random(9), make.random(9)]
    layers = [make.random(12, 9), make.random(12), make.random(12, 9), make.random(12)]
    return [make.random(2, 7, 7, 9), make.mask(2, 7, 7), *norm, *layers]


def _queries_of_columns(make: Inputs) -> list[Tensor]:
    mask = make.mask(2, 37, 7)
    mask[0, :, 0] = 0  # a column without keys
    return [make.random(2, 7, 5, 8), make.random(2, 37, 7, 2, 8), mask]


def _two_shards(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Of two shards, one of them small: their shifts differ, and do not matter."""
    q, *sharded = tensors
    shards = zip(*(x.split([x.shape[1] - 2, 2], 1) for x in sharded), strict=True)
    sums = added_softmax_sums(torch.stack([function(q, *shard, **settings) for shard in shards]))
    return sums[..., :-1] / sums[..., -1:]


def _three_layers(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    x, weight, bias, w1, w2, b2, w3 = tensors
    return function(x, weight, bias, [w1, w2, w3], [None, b2, None], **settings)


def _two_layers(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    x, mask, weight, bias, w1, w2, b2 = tensors
    return function(x, mask, weight, bias, [w1, w2], [None, b2], **settings)


OPERATORS: dict[str, Spec] = {
    "attention": Spec(reference.attention, _heads, mask=1),
    "biased_attention": Spec(
        reference.biased_attention,
        # Not every position has a query.
        lambda make: [*_heads(make), make.random(2, 28, 37, 3).permute(0, 3, 1, 2)],
        mask=1,
        settings={"first": 6},
    ),
    "dropout_add": Spec(
        reference.dropout_add,
        lambda make: [make.random(2, 5, 7, 12), make.random(2, 5, 7, 12), make.keys()],
        mask=2,
        settings={"rate": 0.25, "offsets": (2, 0), "whole": (9, 7), "shared_dim": 2},
    ),
    "gated_linear": Spec(
        reference.gated_linear,
        lambda make: [make.random(2, 1, 7, 9), make.random(2, 5, 7, 9), make.random(6, 9), make.random(6)],
    ),
    "gated_output": Spec(
        reference.gated_output,
        lambda make: [
            make.random(2, 9, 5, 7).permute(0, 2, 3, 1),  # channels are outermost in the product of triangles
            make.random(2, 5, 7, 6), make.random(9), make.random(9), make.random(6, 9), make.random(6),
        ],
    ),
    "gated_projection": Spec(reference.gated_projection, _operands, mask=1),
    "global_attention": Spec(reference.global_attention, _queries_of_columns, mask=2, call_with=_two_shards),
    "layer_norm": Spec(
        reference.layer_norm, lambda make: [make.random(2, 5, 7, 9), make.random(9), make.random(9)]
    ),
    "linear": Spec(reference.linear, lambda make: [make.random(2, 5, 7, 9), make.random(6, 9), make.random(6)]),
    "outer_product": Spec(
        reference.outer_product,
        lambda make: [
            make.random(2, 9, 5, 8), make.random(2, 9, 7, 8), make.random(6, 64), make.random(6),
            make.random(2, 5, 7, 1).abs() + 1,
        ],
        mask=4,
    ),
    "pooled_projections": Spec(
        reference.pooled_projections,
        lambda make: [
            make.random(2, 5, 7, 9), make.mask(2, 5, 7), make.random(9), make.random(9),
            make.random(12, 9), make.random(6, 9), make.random(6),
        ],
        mask=1,
        call_with=_two_layers,
    ),
    "projections": Spec(
        reference.projections,
        lambda make: [
            make.random(2, 5, 7, 9), make.random(9), make.random(9),
            make.random(12, 9), make.random(6, 9), make.random(4), make.random(3, 9),
        ],
        settings={"planes": 1},
        call_with=_three_layers,
    ),
    "transition": Spec(
        reference.transition,
        lambda make: [
            make.random(2, 5, 7, 9), make.random(9), make.random(9),
            make.random(20, 9), make.random(20), make.random(9, 20), make.random(9),
        ],
    ),
    "triangle_product": Spec(
        reference.triangle_product,
        lambda make: [*_operands(make), make.random(10, 9), make.random(10)],
        mask=1,
        settings={"outgoing": True},
    ),
}  # fmt: skip
"""By name."""


class Kernels:
    """The implementation of each operator, by its name. `chunked` implements those that are not given."""

    def __init__(self, **chosen: Operator) -> None:
        if unknown := chosen.keys() - OPERATORS.keys():
            raise TypeError(f"there is no operator {', '.join(sorted(unknown))}; there are {', '.join(OPERATORS)}")
        for name in OPERATORS:
            setattr(self, name, chosen.get(name, getattr(chunked, name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Operator: ...

    @classmethod
    def of(cls, backend: ModuleType) -> Kernels:
        """The operators of a backend; `chunked` implements those that it lacks."""
        return cls(**{name: getattr(backend, name) for name in OPERATORS if hasattr(backend, name)})

    def replaced(self, **chosen: Operator) -> Kernels:
        """With other implementations of some operators."""
        return Kernels(**{**vars(self), **chosen})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernels) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))
