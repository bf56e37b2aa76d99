"""Compares a backend's operator with its formula on the device of a run, so that a faulty package or driver is found at the
start.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from evodsp.model.kernels.operators import OPERATORS, Operator, Spec

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest allowed difference, as a fraction of the largest number of each result. The limit for fp32 allows for products in
TF32, that for fp64 for rows without keys, whose logits of -1e9 keep few digits."""


def problem_of(
    operator: str, function: Operator, device: torch.device, dtype: torch.dtype, gradients: bool = True
) -> str:
    """The reason why the function cannot be used for the operator on this device; '' if it agrees with the formula.

    `gradients`: whether to compare the backward pass too. Any exception counts as a problem: a kernel that does not compile
    must not end a run that another backend can do. A process compares a function that agrees once, and one that does not
    whenever it is asked, because memory may have been short.
    """
    try:
        _compare(operator, function, device, dtype, gradients)
    except _DiffersError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


class _DiffersError(Exception):
    """The function is not the formula."""


@cache
def _compare(operator: str, function: Operator, device: torch.device, dtype: torch.dtype, gradients: bool) -> None:
    """Raise an exception unless the function agrees with the formula. `cache` forgets calls that raise one."""
    spec = OPERATORS[operator]
    inputs = spec.inputs(device, dtype)
    found = _results(spec, function, inputs, gradients)
    wide = torch.promote_types(dtype, torch.float32)
    exact = [x.to(wide) if x.is_floating_point() else x for x in inputs]
    expected = _results(spec, spec.formula, exact, gradients)
    wanted = spec.differentiable(inputs)
    results = len(expected) - (len(wanted) if gradients else 0)
    names = [f"result {n + 1}" if results > 1 else "the result" for n in range(results)]
    names += [f"the gradient of argument {n + 1}" for n in wanted]
    for name, x, y in zip(names, found, expected, strict=False):  # without gradients only results are compared
        if x.shape != y.shape:
            raise _DiffersError(f"{name} has shape {list(x.shape)} instead of {list(y.shape)}")
        difference = float((x.to(y.dtype) - y).abs().max() / y.abs().max())
        if not difference <= TOLERANCE[dtype]:  # this condition rejects NaN too
            limit = f"{TOLERANCE[dtype]:.0e}"
            raise _DiffersError(f"{name} differs by {difference:.1e} of its largest number, more than {limit}")


def _results(spec: Spec, function: Operator, inputs: list[Tensor], gradients: bool) -> list[Tensor]:
    """The results of the function and, with `gradients`, the gradients of all inputs but the mask."""
    arguments = [x.detach() for x in inputs]
    wanted = [arguments[n].requires_grad_(gradients) for n in spec.differentiable(inputs)]
    outputs = spec.call(function, arguments)
    if not gradients:
        return list(outputs)
    weights = [torch.linspace(-1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, wanted, weights)]
