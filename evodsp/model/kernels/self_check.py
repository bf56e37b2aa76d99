"""Compares a backend's operator with its formula, on the device of a run: a wrong package or driver shows at the start."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evodsp.model.kernels import reference

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference, as a fraction of the largest number of each result. fp32 allows for products in TF32, fp64 for rows
without keys, whose logits of -1e9 keep few digits."""


def problem_of(
    operator: str, function: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, gradients: bool = True
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
    expected = _results(operator, getattr(reference, operator), [x.to(wide) for x in inputs], gradients)
    wanted = [n for n in range(len(inputs)) if n != MASKS.get(operator)]
    names = ["the result", *(f"the gradient of argument {n + 1}" for n in wanted)]
    for name, x, y in zip(names, found, expected, strict=False):  # without gradients, only the result
        if x.shape != y.shape:
            return f"{name} has shape {list(x.shape)} instead of {list(y.shape)}"
        difference = float((x.to(y.dtype) - y).abs().max() / y.abs().max())
        if not difference <= TOLERANCE[dtype]:  # NaN is no good either
            return f"{name} differs by {difference:.1e} of its largest number, more than {TOLERANCE[dtype]:.0e}"
    return ""


MASKS = {"attention": 4, "biased_attention": 4, "gated_projection": 1}
"""Number of the argument that is a mask and gets no gradient."""


def examples(operator: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Small inputs of an operator: sizes that differ and do not divide, some keys masked, strides as in the model."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    if operator == "gated_projection":
        mask = (random(2, 5, 7) > -1).to(dtype)
        return [random(2, 5, 7, 9), mask, random(12, 9), random(12), random(12, 9), random(12)]
    if operator == "transition":
        return [random(2, 5, 7, 9), random(20, 9), random(20), random(9, 20), random(9)]
    if operator == "outer_product":
        return [random(2, 9, 5, 8), random(2, 9, 7, 8), random(6, 64)]
    rows, length, heads, width = 5, 37, 3, 16
    # Columns: the fused projection and the gate are transposed views.
    qkv = random(2, length, rows, 3, heads, width).transpose(1, 2)
    gate = random(2, length, rows, heads, width).transpose(1, 2)
    keys = torch.rand(2, rows, length, generator=generator) > 0.2
    keys[0, 0] = False  # a row without keys
    inputs = [*qkv.unbind(3), gate, keys.to(device, dtype)]
    if operator == "biased_attention":
        inputs.append(random(2, length, length, heads).permute(0, 3, 1, 2))
    return inputs


def _results(operator: str, function: Callable[..., Tensor], inputs: list[Tensor], gradients: bool) -> list[Tensor]:
    """The output and, with `gradients`, those of all inputs but the mask."""
    arguments = [x.detach().requires_grad_(gradients and n != MASKS.get(operator)) for n, x in enumerate(inputs)]
    output = function(*arguments)
    if not gradients:
        return [output]
    weights = torch.linspace(-1, 2, output.numel(), device=output.device).to(output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, [x for x in arguments if x.requires_grad], weights)]
