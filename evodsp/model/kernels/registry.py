"""Chooses an implementation of each operator by the device, the installed packages, and a comparison with the formulas.

A backend is a module of this folder, with functions named after the operators that they implement. A new backend is one
file, and one line of the table in `backends`.

`choose` runs once, when a run starts. The model calls the functions that it returns, and knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from evodsp.config import KernelsConfig
from evodsp.model.kernels import chunked
from evodsp.model.kernels.backends import BACKENDS, Backend, check_names
from evodsp.model.kernels.operators import OPERATORS, Kernels, Operator, Spec

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


OnAllRanks = Callable[[str | None], list[str | None]]


@dataclass(frozen=True)
class Choice:
    """The implementation chosen for one operator."""

    operator: str
    backend: str
    reason: str
    """The reason for the choice, for the log."""
    problems: tuple[str, ...] = ()
    """Problems of the backends that were tried before."""


def summary(choices: Sequence[Choice], device: torch.device) -> list[str]:
    """Lines for the log: the backend of each operator with the reason, and a warning for each problem with another backend."""
    used: dict[tuple[str, str], list[str]] = {}
    problems: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        used.setdefault((choice.backend, choice.reason), []).append(choice.operator)
        for problem in choice.problems:
            problems.setdefault((problem, choice.backend), []).append(choice.operator)
    places = [f" for {', '.join(names)}" if len(used) > 1 else "" for names in used.values()]
    parts = [f"{backend} ({reason}){place}" for (backend, reason), place in zip(used, places, strict=True)]
    warnings = [
        f"warning: kernels: {problem}; {backend} is used instead for {', '.join(names)}"
        for (problem, backend), names in problems.items()
    ]
    return [f"kernels on {device.type}: {'; '.join(parts)}", *warnings]


def choose(
    config: KernelsConfig,
    device: torch.device,
    dtype: torch.dtype,
    gradients: bool = True,
    on_all_ranks: OnAllRanks = lambda value: [value],
) -> tuple[Kernels, list[Choice]]:
    """The operators of a run on `device` whose activations have this dtype, and the reason for each choice.

    Each candidate is compared with `reference` on the device, at a small size. With `gradients`, for a training run, the
    backward pass is compared too. A candidate that differs or fails is passed over, and `chunked` takes its place.

    `on_all_ranks` gathers a value of every rank, by rank. A candidate that fails on one rank is passed over on all, so that
    all ranks compute alike. All ranks call this together.

    Raises SettingError for a backend that does not exist.
    """
    check_names(config)
    kernels, choices = Kernels(), []
    for operator in OPERATORS:

        def problem(backend: Backend, operator: str = operator) -> str | None:
            problems = on_all_ranks(_problem(operator, backend, device, dtype, gradients))
            if len(set(problems)) == 1:
                return problems[0]
            return next(f"rank {rank}: {p or f'it has no {operator}'}" for rank, p in enumerate(problems) if p != "")

        function, choice = _chosen(operator, config, device, problem)
        kernels = kernels.replaced(**{operator: function})
        choices.append(choice)
    return kernels, choices


def _problem(operator: str, backend: Backend, device: torch.device, dtype: torch.dtype, gradients: bool) -> str | None:
    """The reason why this rank cannot use a backend's operator: empty if it can, None if the backend lacks the operator."""
    try:
        function = getattr(backend.load(), operator, None)
    except Exception as error:  # the package of an extra may be absent, or broken in any way
        reason = (str(error).splitlines() or [""])[0]
        return reason if isinstance(error, ImportError) else f"{type(error).__name__}: {reason}"
    return problem_of(operator, function, device, dtype, gradients) if function else None


def _chosen(
    operator: str, config: KernelsConfig, device: torch.device, problem: Callable[[Backend], str | None]
) -> tuple[Operator, Choice]:
    """The chosen function of one operator, and the reason. `problem`: `_problem` for all ranks."""
    own = getattr(config, operator)
    wanted = own or config.backend
    candidates = [wanted] if wanted != "auto" else [n for n, b in BACKENDS.items() if device.type in b.devices]
    problems: list[str] = []
    for name in candidates:
        found = problem(BACKENDS[name])
        if found == "":
            reason = "asked for" if name == wanted else f"the first that works on {device.type}"
            function = getattr(BACKENDS[name].load(), operator)
            return function, Choice(operator, name, reason, tuple(problems))
        if found or own:
            problems.append(f"{name}: {found or f'it has no {operator}'}")
    return getattr(chunked, operator), Choice(operator, "chunked", f"instead of {wanted}", tuple(problems))
