"""Compares a backend's operator with its formula, on the device of a run: a wrong package or driver shows at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels import reference
from evodsp.parallel.exchange import added_softmax_sums

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference, as a fraction of the largest number of each result. fp32 allows for products in TF32, fp64 for rows
without keys, whose logits of -1e9 keep few digits."""


def problem_of(
    operator: str, function: Callable[..., Any], device: torch.device, dtype: torch.dtype, gradients: bool = True
) -> str:
    """Why the function cannot be used for the operator here; '' if it computes what the formula does.

    `gradients`: whether to compare the backward pass too. Any exception counts as a problem: a kernel that does not compile
    must not end a run that another backend can do.
    """
    inputs = examples(operator, device, dtype)
    try:
        found = _results(operator, function, inputs, gradients)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    wide = torch.promote_types(dtype, torch.float32)
    exact = [x.to(wide) if x.is_floating_point() else x for x in inputs]
    expected = _results(operator, getattr(reference, operator), exact, gradients)
    wanted = [n for n in range(len(inputs)) if n != MASKS.get(operator)]
    results = len(expected) - (len(wanted) if gradients else 0)
    names = [f"result {n + 1}" if results > 1 else "the result" for n in range(results)]
    names += [f"the gradient of argument {n + 1}" for n in wanted]
    for name, x, y in zip(names, found, expected, strict=False):  # without gradients, only results
        if x.shape != y.shape:
            return f"{name} has shape {list(x.shape)} instead of {list(y.shape)}"
        difference = float((x.to(y.dtype) - y).abs().max() / y.abs().max())
        if not difference <= TOLERANCE[dtype]:  # NaN is no good either
            return f"{name} differs by {difference:.1e} of its largest number, more than {TOLERANCE[dtype]:.0e}"
    return ""


MASKS = {
    "attention": 1,
    "biased_attention": 1,
    "dropout_add": 2,
    "gated_projection": 1,
    "global_attention": 2,
    "outer_product": 4,
    "pooled_projections": 1,
    "triangle_product": 1,
}
"""Number of the argument that is a mask, keys to draw it from, or counts, and gets no gradient."""

SETTINGS: dict[str, dict[str, Any]] = {
    "biased_attention": {"first": 6},
    "dropout_add": {"rate": 0.25, "offsets": (2, 0), "whole": (9, 7), "shared_dim": 2},
    "triangle_product": {"outgoing": True},
}
"""Arguments besides tensors."""


def call(operator: str, function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of `function`, which implements `operator`, for tensors as `examples` gives them."""
    if operator == "projections":
        x, weight, bias, w1, w2, b2, w3 = tensors
        return function(x, weight, bias, [w1, w2, w3], [None, b2, None], planes=1)
    if operator == "pooled_projections":
        x, mask, weight, bias, w1, w2, b2 = tensors
        return function(x, mask, weight, bias, [w1, w2], [None, b2])
    if operator == "global_attention":  # of two shards, one of them small: their shifts differ, and do not matter
        q, *sharded = tensors
        shards = zip(*(x.split([x.shape[1] - 2, 2], 1) for x in sharded), strict=True)
        sums = added_softmax_sums(torch.stack([function(q, *shard) for shard in shards]))
        return (sums[..., :-1] / sums[..., -1:],)
    result = function(*tensors, **SETTINGS.get(operator, {}))
    return result if isinstance(result, tuple) else (result,)


def examples(operator: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Small inputs of an operator: sizes that differ and do not divide, some keys masked, strides as in the model."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    if operator == "dropout_add":
        keys = torch.tensor([0x0123456789ABCDEF, -0x0123456789ABCDEF], device=device)  # the words of a key differ
        return [random(2, 5, 7, 12), random(2, 5, 7, 12), keys]
    norm = [random(9), random(9)]
    if operator in ("gated_projection", "triangle_product"):
        mask = (random(2, 7, 7) > -1).to(dtype)
        inputs = [random(2, 7, 7, 9), mask, *norm, random(12, 9), random(12), random(12, 9), random(12)]
        return inputs if operator == "gated_projection" else [*inputs, random(10, 9), random(10)]
    if operator == "gated_output":
        product = random(2, 9, 5, 7).permute(0, 2, 3, 1)  # channels are outermost in the product of triangles
        return [product, random(2, 5, 7, 6), *norm, random(6, 9), random(6)]
    if operator == "layer_norm":
        return [random(2, 5, 7, 9), *norm]
    if operator == "projections":
        return [random(2, 5, 7, 9), *norm, random(12, 9), random(6, 9), random(4), random(3, 9)]
    if operator == "pooled_projections":
        mask = (random(2, 5, 7) > -1).to(dtype)
        return [random(2, 5, 7, 9), mask, *norm, random(12, 9), random(6, 9), random(6)]
    if operator == "global_attention":
        mask = (random(2, 37, 7) > -1).to(dtype)
        mask[0, :, 0] = 0  # a column without keys
        return [random(2, 7, 5, 8), random(2, 37, 7, 2, 8), mask]
    if operator == "gated_linear":
        return [random(2, 1, 7, 9), random(2, 5, 7, 9), random(6, 9), random(6)]
    if operator == "linear":
        return [random(2, 5, 7, 9), random(6, 9), random(6)]
    if operator == "transition":
        return [random(2, 5, 7, 9), *norm, random(20, 9), random(20), random(9, 20), random(9)]
    if operator == "outer_product":
        return [random(2, 9, 5, 8), random(2, 9, 7, 8), random(6, 64), random(6), random(2, 5, 7, 1).abs() + 1]
    rows, length, heads, width = 5, 37, 3, 16
    projected = random(2, length, rows, 4, heads, width).transpose(1, 2)  # as for columns
    keys = torch.rand(2, rows, length, generator=generator) > 0.2
    keys[0, 0] = False  # a row without keys
    inputs = [projected, keys.to(device, dtype)]
    if operator == "biased_attention":  # not every position has a query
        inputs.append(random(2, length - 9, length, heads).permute(0, 3, 1, 2))
    return inputs


def _results(operator: str, function: Callable[..., Any], inputs: list[Tensor], gradients: bool) -> list[Tensor]:
    """What the function returns and, with `gradients`, those of all inputs but the mask."""
    arguments = [x.detach().requires_grad_(gradients and n != MASKS.get(operator)) for n, x in enumerate(inputs)]
    outputs = call(operator, function, arguments)
    if not gradients:
        return list(outputs)
    weights = [torch.linspace(-1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape) for x in outputs]
    wanted = [x for x in arguments if x.requires_grad]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, wanted, weights)]
