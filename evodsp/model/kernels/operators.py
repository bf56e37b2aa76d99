"""The operators with several implementations. Each is declared once, in the table `OPERATORS`.

To add an operator, write its formula in `reference`, its entry here, its field of `KernelsConfig` and a function in
`chunked`, which may be the formula itself. To implement an operator in a backend, define a function of its name in the
backend's module.
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
"""A function of tensors and settings that returns one tensor or several."""


class ExampleFactory:
    """Makes the random tensors of an example, the same ones each time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def random(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def mask(self, *shape: int) -> Tensor:
        """A mask of ones with some zeros."""
        return (torch.rand(shape, generator=self._generator) > 0.2).to(self._device, self._dtype)

    def keys(self) -> Tensor:
        """Dropout keys of two random streams. Their words differ."""
        return torch.tensor([0x0123456789ABCDEF, -0x0123456789ABCDEF], device=self._device)


def _plainly(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    return function(*tensors, **settings)


@dataclass(frozen=True)
class Spec:
    """One operator: its formula, and the inputs on which implementations are compared with it."""

    formula: Operator
    examples: Callable[[ExampleFactory], list[Tensor]]
    """Function that makes small inputs: sizes differ and do not divide, some keys are masked, strides are as in the model."""
    mask: int | None = None
    """Index of the input without gradient: a mask, or counts. Integers have none either."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are not tensors."""
    call_with: Callable[[Operator, Sequence[Tensor], Mapping[str, Any]], Any] = _plainly
    """Function that calls an implementation with the tensors of `examples`."""

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The tensors of the example."""
        return self.examples(ExampleFactory(device, dtype))

    def differentiable(self, inputs: Sequence[Tensor]) -> list[int]:
        """Indices of the inputs that get gradients."""
        return [n for n, x in enumerate(inputs) if n != self.mask and x.is_floating_point()]

    def call(self, function: Operator, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results of an implementation for tensors like those of `examples`."""
        result = self.call_with(function, tensors, self.settings)
        return result if isinstance(result, tuple) else (result,)


def _heads(make: ExampleFactory) -> list[Tensor]:
    rows, length, heads, width = 5, 37, 3, 16
    keys = make.mask(2, rows, length)
    keys[0, 0] = 0  # a row without keys
    return [make.random(2, length, rows, 4, heads, width).transpose(1, 2), keys]  # strides as in column attention


def _operands(make: ExampleFactory) -> list[Tensor]:
    norm = [make.random(9), make.random(9)]
    layers = [make.random(12, 9), make.random(12), make.random(12, 9), make.random(12)]
    return [make.random(2, 7, 7, 9), make.mask(2, 7, 7), *norm, *layers]


def _triangles(make: ExampleFactory) -> list[Tensor]:
    """AlphaFold2's width, for which a GPU has fused kernels. Weights are scaled so that gates do not saturate."""
    c = 128
    norms = [[make.random(c), make.random(c)] for _ in range(2)]
    layers = [[make.random(out, c) / 11, make.random(out)] for out in (2 * c, 2 * c, c, c)]
    before, after = layers[:3], layers[3]
    parameters = *norms[0], *(x for layer in before for x in layer), *norms[1], *after
    return [make.random(2, 7, 7, c), make.mask(2, 7, 7), *parameters, make.keys()]


def _products(make: ExampleFactory) -> list[Tensor]:
    """A shard of the pair and of the product, of AlphaFold2's width as above."""
    c = 128
    norms = [[make.random(c), make.random(c)] for _ in range(2)]
    gate, layer = ([make.random(c, c) / 11, make.random(c)] for _ in range(2))
    return [make.random(2, 5, 7, c), make.random(2, 5, 7, c), *norms[0], *gate, *norms[1], *layer, make.keys()]


def _under_dropout(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Tensor:
    *tensors, keys = tensors
    return function(*tensors, drawn=keys, **settings)


def _queries_of_columns(make: ExampleFactory) -> list[Tensor]:
    mask = make.mask(2, 37, 7)
    mask[0, :, 0] = 0  # a column without keys
    return [make.random(2, 7, 5, 8), make.random(2, 37, 7, 2, 8), mask]


def _two_shards(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Call global attention on two shards, one of them small. Their shifts differ, and the result must not depend on them."""
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
        settings={"rate": 0.25, "offsets": (2, 0), "whole": (9, 7), "shared_dim": 2},
    ),
    "gated_linear": Spec(
        reference.gated_linear,
        lambda make: [make.random(2, 1, 7, 9), make.random(2, 5, 7, 9), make.random(6, 9), make.random(6)],
    ),
    "gated_output": Spec(
        reference.gated_output,
        _products,
        settings={"rate": 0.25, "offsets": (2, 0), "whole": (9, 7), "shared_dim": 2},
        call_with=_under_dropout,
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
    "triangle_multiplication": Spec(
        reference.triangle_multiplication,
        _triangles,
        mask=1,
        settings={"outgoing": True, "rate": 0.25},
        call_with=_under_dropout,
    ),
}  # fmt: skip
"""All operators by name."""


class Kernels:
    """The implementation of each operator, by its name. `chunked` implements the operators that are not given."""

    def __init__(self, **chosen: Operator) -> None:
        if unknown := chosen.keys() - OPERATORS.keys():
            raise TypeError(f"there is no operator {', '.join(sorted(unknown))}; there are {', '.join(OPERATORS)}")
        for name in OPERATORS:
            setattr(self, name, chosen.get(name, getattr(chunked, name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Operator: ...

    @classmethod
    def of(cls, backend: ModuleType) -> Kernels:
        """The operators of a backend. `chunked` implements the operators that it lacks."""
        return cls(**{name: getattr(backend, name) for name in OPERATORS if hasattr(backend, name)})

    def replaced(self, **chosen: Operator) -> Kernels:
        """These operators with some implementations replaced."""
        return Kernels(**{**vars(self), **chosen})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernels) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))
