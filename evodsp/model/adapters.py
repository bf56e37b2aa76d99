"""Low-rank adapters of weights (LoRA, arXiv 2106.09685): a frozen W is used as W + B A, and only B and A are trained.

A module with a weight W [out, in] gets two parameters beside it: `weight_up`, B [out, rank], and `weight_down`, A [rank, in].
B begins with zeros, so that the model begins as it was. `evodsp.model.precision.CastParameters` forms W + B A once a step,
where it casts parameters, so that no layer, kernel, shard or recording knows of adapters. `merged` gives the weights of a
checkpoint without them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

UP, DOWN = "_up", "_down"
_ADAPTED = "weight"
"""The name that each module gives its matrix."""
ADAPTERS = (_ADAPTED + UP, _ADAPTED + DOWN)
"""The names of the parameters of an adapter in their module."""


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its full name or that in its module, is part of an adapter."""
    return name.endswith(ADAPTERS)


def add_adapters(model: nn.Module, rank: int, chosen: Callable[[str], bool], generator: torch.Generator) -> None:
    """Add adapters of this rank to the matrices that `chosen` takes by their names, and freeze these.

    A matrix with a side that is no longer than `rank` gets none: it would have as many numbers as the matrix. A begins with
    normal numbers of variance 1 / in, drawn from `generator`, a CPU's, in the order of the model.
    """
    for path, module in model.named_modules():
        weight = module._parameters.get(_ADAPTED)
        if weight is None or weight.dim() != 2 or min(weight.shape) <= rank or not chosen(f"{path}.{_ADAPTED}"):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        weight.requires_grad_(False)
        module.register_parameter(_ADAPTED + UP, nn.Parameter(weight.new_zeros(rows, rank)))
        module.register_parameter(_ADAPTED + DOWN, nn.Parameter(down.to(weight)))


def adapted_weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules of the model with an adapter, and the name of the weight that has it."""
    return [(module, _ADAPTED) for module in model.modules() if _ADAPTED + UP in module._parameters]


def with_adapters(adapted: Sequence[tuple[nn.Module, str]]) -> list[Tensor]:
    """W + B A of each of the `adapted_weights`. Products of one shape are computed together."""
    return _sums([tuple(_parameter(module, name + suffix) for suffix in ("", UP, DOWN)) for module, name in adapted])


def _parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter itself, also while a copy hides it."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model by their names, those with an adapter as W + B A.

    Raises KeyError with the name of the array that an adapter lacks.
    """
    names = [name.removesuffix(UP) for name in weights if name.endswith(_ADAPTED + UP)]
    sums = _sums([(weights[name], weights[name + UP], weights[name + DOWN]) for name in names])
    kept = {name: value for name, value in weights.items() if not is_adapter(name)}
    return {**kept, **dict(zip(names, sums, strict=True))}


def _sums(parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for number, (weight, _, _) in enumerate(parts):
        by_shape[weight.shape].append(number)
    sums: dict[int, Tensor] = {}
    for numbers in by_shape.values():
        weights, ups, downs = zip(*(parts[number] for number in numbers), strict=True)
        with torch.autocast(weights[0].device.type, enabled=False):
            products = torch.stack(ups) @ torch.stack(downs)
        sums.update(zip(numbers, torch._foreach_add(weights, products.unbind()), strict=True))
    return [sums[number] for number in range(len(parts))]
